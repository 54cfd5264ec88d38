"""Reward curves over optimizer steps: training rewards and held-out scores, for `reward.png` and for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl_vlm.log.metrics import function_name, is_number, is_score

MOST_POINTS = 240
"""Largest number of drawn points in a series. In longer ones, consecutive points are averaged."""
STYLES = {"line": {"linewidth": 1, "alpha": 0.6}, "dots": {"linewidth": 2, "marker": "o"}}


@dataclass(frozen=True)
class Point:
    """A value at an optimizer step, with the ends of its band, if it has one."""

    step: int | float
    value: int | float
    low: int | float | None = None
    high: int | float | None = None


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    points: list[Point]
    color: int = 0
    """Index of a colour of the page."""
    style: Literal["line", "dots", "area"] = "line"


def draw_curve(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the lines of `metrics.jsonl` to a PNG: the reward, and the scores of the reward functions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    reward, *scores = reward_metrics(lines)
    panels = {"reward": [reward], "score by reward function": scores}
    for axes, (title, metrics) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        axes.set(title=title, xlabel="optimizer step")
        axes.grid(alpha=0.3)
        for color, (name, metric) in enumerate(metrics):
            for series in reward_series(lines, metric):
                steps, values = [p.step for p in series.points], [p.value for p in series.points]
                label = f"{name} ({series.label})"
                axes.plot(steps, values, color=f"C{color}", label=label, **STYLES[series.style])
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=120)


def reward_metrics(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the name and the metric of the reward, and of the mean score of each reward function."""
    functions = dict.fromkeys(function_name(metric) for line in lines for metric in line if is_score(metric))
    return [("Reward", "reward"), *((name, f"rewards/{name}/mean") for name in functions)]


def reward_series(lines: Sequence[Mapping[str, Any]], metric: str) -> list[Series]:
    """Return a reward in training and on held-out rows."""
    series = [
        Series("training", thinned(metric_points(lines, metric))),
        Series("held out", held_out_points(lines, metric), 1, "dots"),
    ]
    return [one for one in series if one.points]


def held_out_points(lines: Sequence[Mapping[str, Any]], metric: str) -> list[Point]:
    """Return a held-out score at each evaluation, with its interval if it has one."""
    name = f"eval_{metric}"
    prefix = name.removesuffix("mean")
    return points_of(lines, name, f"{prefix}ci_low", f"{prefix}ci_high")


def metric_points(lines: Sequence[Mapping[str, Any]], metric: str) -> list[Point]:
    """Return a metric at the steps at which it was measured. Lengths have a band from shortest to longest."""
    bounds = [metric.replace("mean", bound) for bound in ("min", "max")] if metric.endswith("mean_length") else ["", ""]
    return points_of(lines, metric, *bounds)


def points_of(lines: Sequence[Mapping[str, Any]], name: str, low: str, high: str) -> list[Point]:
    """Return the values of a metric, with a band between two others."""
    return [
        Point(line["step"], line[name], line.get(low), line.get(high)) for line in lines if is_number(line.get(name))
    ]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Average consecutive points and their bands, so that at most `MOST_POINTS` are left."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return list(points)
    return [mean_point(points[start : start + size]) for start in range(0, len(points), size)]


def mean_point(points: Sequence[Point]) -> Point:
    def mean(values: Sequence[Any]) -> float | None:
        return None if any(value is None for value in values) else float(np.mean(values))

    step, value = float(np.mean([p.step for p in points])), float(np.mean([p.value for p in points]))
    return Point(step, value, mean([p.low for p in points]), mean([p.high for p in points]))
