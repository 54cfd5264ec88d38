"""Curves of a report: series of points with bands, from metrics and completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rl_vlm.log.metrics import function_name, is_score, seconds_of
from rl_vlm.stages import AHEAD, PARTS_OF_TRAINING, Stage
from rl_vlm.tools.report.diversity import distinct_answers
from rl_vlm.tools.report.read import RunResults, values_of

MOST_POINTS = 240
"""Largest number of drawn points in a series. In longer ones, consecutive points are averaged."""
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5% quantiles of Student's t for 1 to 30 degrees of freedom. For more, the normal distribution is close."""
Z_95 = 1.96
MOST_STAGES = 5
NO_STAGE = tuple(map(seconds_of, (Stage.STEP, *PARTS_OF_TRAINING, Stage.SAVE, AHEAD)))
"""Metrics that do not add up to the seconds of a step: the step itself, parts of training, saving, sampling ahead."""
CLIPPED = {
    "clip_ratio/region_mean": "low or high", "clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high",
    "cispo_clip_ratio": "cispo",
}  # fmt: skip


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


@dataclass(frozen=True)
class Chart:
    """Series over optimizer steps. The areas of a stacked chart stand on each other."""

    title: str
    note: str
    series: list[Series] = field(default_factory=list)


def charts_of(runs: Sequence[RunResults]) -> list[Chart]:
    """Return the charts of training runs; evaluations have none. Several runs are overlaid, in one colour each."""
    charts = [reward_chart(runs, "reward", "Reward")]
    names = dict.fromkeys(function_name(m) for run in runs for line in run.lines for m in line if is_score(m))
    charts += [reward_chart(runs, f"rewards/{name}/mean", name, name) for name in names]
    charts += [
        metric_chart(runs, "Completion length", "tokens: mean, with shortest to longest", ["completions/mean_length"]),
        metric_chart(runs, "Cut off", "share of completions at the length limit", ["completions/clipped_ratio"]),
        answers_chart(runs),
        metric_chart(runs, "Groups of equal rewards", "share of groups, without advantages", ["frac_reward_zero_std"]),
        metric_chart(runs, "Entropy", "mean per token, in nats", ["entropy"]),
        metric_chart(runs, "KL", "mean per token, to the reference", ["kl"]),
        metric_chart(runs, "Clipped tokens", "share of tokens whose ratio is clipped", list(CLIPPED)),
        metric_chart(
            runs, "Staleness", "updates since the completions were sampled", ["sampling/policy_version_lag"]
        ),
        *(stages_chart(run, several=len(runs) > 1) for run in runs if run.lines),
        metric_chart(runs, "Memory", "of the process that holds most, in GiB", ["memory/held_gib"]),
        metric_chart(runs, "Token budget", "tokens of a micro-batch", ["memory/micro_batch_tokens"]),
        metric_chart(runs, "Gradient norm", "before clipping", ["grad_norm"]),
        metric_chart(runs, "Loss", "of the step", ["loss"]),
        metric_chart(runs, "Learning rate", "of the step", ["learning_rate"]),
    ]  # fmt: skip
    return [chart for chart in charts if chart.series]


def reward_chart(runs: Sequence[RunResults], metric: str, title: str, column: str = "reward") -> Chart:
    """Chart a reward in training and on held-out rows, each with the 95% interval of its mean."""
    series = []
    for i, run in enumerate(runs):
        training = window_points(run, column) or metric_points(run, metric)
        held_out = held_out_points(run, metric)
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        color, other = (i, i) if len(runs) > 1 else (0, 1)
        series += [
            Series(f"{prefix}training", thinned(training), color),
            Series(f"{prefix}held out", held_out, other, "dots"),
        ]
    note = "mean over prompts; band and bars: 95% interval"
    return Chart(title, note, [one for one in series if one.points])


def window_points(run: RunResults, column: str) -> list[Point]:
    """Return the mean of a column over the prompts of each window, with its 95% interval by Student's t.

    The mean of one prompt has no interval.
    """
    points = []
    for step, groups in run.windows.items():
        means = [float(np.mean(values)) for group in groups if (values := values_of(group, column))]
        if means:
            half = half_interval(means)
            mean = float(np.mean(means))
            points.append(Point(step + 1, mean, *((mean - half, mean + half) if half is not None else ())))
    return points


def half_interval(values: Sequence[float]) -> float | None:
    """Return half of the 95% interval of a mean, or None if there is one value."""
    if len(values) == 1:
        return None
    quantile = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else Z_95
    return quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5


def held_out_points(run: RunResults, metric: str) -> list[Point]:
    """Return a held-out score at each evaluation, with its interval if it has one."""
    name = f"eval_{metric}"
    prefix = name.removesuffix("mean")
    return [
        Point(line["step"], line[name], line.get(f"{prefix}ci_low"), line.get(f"{prefix}ci_high"))
        for line in run.lines
        if is_number(line.get(name))
    ]


def metric_points(run: RunResults, metric: str) -> list[Point]:
    """Return a metric at the steps at which it was measured. Lengths have a band from shortest to longest."""
    bounds = [metric.replace("mean", bound) for bound in ("min", "max")] if metric.endswith("mean_length") else ["", ""]
    return [
        Point(line["step"], line[metric], line.get(bounds[0]), line.get(bounds[1]))
        for line in run.lines
        if is_number(line.get(metric))
    ]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def metric_chart(runs: Sequence[RunResults], title: str, note: str, metrics: Sequence[str]) -> Chart:
    """Chart all metrics of a single run, one colour each. If there are several runs, chart each one's first metric."""
    if len(runs) > 1:
        points = [next(filter(None, (metric_points(run, metric) for metric in metrics)), []) for run in runs]
        found = [(i, run.name, points[i]) for i, run in enumerate(runs)]
    else:
        labels = [CLIPPED.get(metric, metric.split("/")[-1].replace("_", " ")) for metric in metrics]
        found = [(i, labels[i], metric_points(run, metric)) for run in runs for i, metric in enumerate(metrics)]
        found = [one for one in found if any(point.value for point in one[2])] or found[:1]
    return Chart(title, note, [Series(label, thinned(points), i) for i, label, points in found if points])


def answers_chart(runs: Sequence[RunResults]) -> Chart:
    """Chart the mean number of distinct answers per group."""
    series = [Series(run.name, thinned(answer_points(run)), i) for i, run in enumerate(runs)]
    if len(runs) == 1:
        series = [Series("per group", series[0].points)]
    return Chart("Distinct answers", "mean number per group", [one for one in series if one.points])


def answer_points(run: RunResults) -> list[Point]:
    return [
        Point(step + 1, float(np.mean([distinct_answers(group, run.decisive[0]) for group in groups])))
        for step, groups in run.windows.items()
    ]


def stages_chart(run: RunResults, several: bool) -> Chart:
    """Chart the seconds of a step by stage: the longest stages one by one, and all others together."""
    steps = [line for line in run.lines if seconds_of(Stage.STEP) in line]
    totals: dict[str, float] = {}
    for line in steps:
        for name, value in line.items():
            if name.startswith(seconds_of("")) and not name.startswith(NO_STAGE):
                totals[name] = totals.get(name, 0.0) + value
    longest = sorted(totals, key=totals.__getitem__, reverse=True)[:MOST_STAGES]
    seconds = {name: [line.get(name, 0.0) for line in steps] for name in longest}
    rest = np.array([line[seconds_of(Stage.STEP)] for line in steps]) - np.sum(list(seconds.values()), axis=0)
    seconds[seconds_of("other")] = np.maximum(rest, 0.0).tolist()
    below = np.zeros(len(steps))
    series = []
    for i, (name, own) in enumerate(seconds.items()):
        above = below + own
        points = [
            Point(line["step"], float(top), float(low), float(top))
            for line, top, low in zip(steps, above, below, strict=True)
        ]
        series.append(Series(name.removeprefix(seconds_of("")), thinned(points), i, "area"))
        below = above
    title = f"Seconds by stage: {run.name}" if several else "Seconds by stage"
    return Chart(title, "of a step; stages stand on each other", series if steps else [])


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
