"""Charts as data that the page's script draws, in words for readers who do not see them, and small curves as paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rl_vlm.log.curve import Point, Series
from rl_vlm.log.metrics import seconds_of
from rl_vlm.stages import Stage
from rl_vlm.tools.report.curves import Chart

T = TypeVar("T")

MOST_KNOTS = 500
"""Largest number of steps for which the page knows the time and the tokens. It interpolates between them."""
MOST_SPARKS = 60


@dataclass(frozen=True)
class Legend:
    """A series under its chart."""

    label: str
    color: int
    style: str
    latest: str


@dataclass(frozen=True)
class Figure:
    """A chart of the page without its drawing."""

    title: str
    note: str
    summary: str
    """The chart in words, for readers who do not see it."""
    lines: list[Legend]


def figure_of(chart: Chart) -> Figure:
    """Return the texts around a chart's drawing."""
    words = "; ".join(f"{series.label}: {in_words(series)}" for series in chart.series)
    lines = [
        Legend(series.label, series.color, series.style, value_text(series.points[-1], series.style))
        for series in chart.series
    ]
    return Figure(chart.title, chart.note, f"{chart.title}. {words}", lines)


def chart_data(chart: Chart, num_runs: int) -> dict[str, Any]:
    """Return the numbers from which the page's script draws a chart. charts.js reads these keys."""
    return {
        "series": [
            {
                "label": series.label,
                "run": 0 if num_runs == 1 else series.color if chart.run is None else chart.run,
                "color": series.color % 8,
                "style": series.style,
                "points": [[short(value) for value in numbers(point)] for point in series.points],
            }
            for series in chart.series
        ]
    }


def numbers(point: Point) -> list[int | float]:
    """Return the step and the value of a point, and the ends of its band if it has one."""
    known = [point.step, point.value]
    return known if point.low is None or point.high is None else [*known, point.low, point.high]


def short(value: int | float) -> float | int:
    """Round a number to five digits, and drop a fraction that is 0."""
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded


def clock_of(lines: Sequence[Mapping[str, Any]]) -> list[list[int | float]]:
    """Return steps with the seconds and the tokens of all steps so far, for the other axes of the charts.

    The tokens are 0 if a step does not count them. Returns an empty list if steps are not timed.
    """
    trained = [line for line in lines if line["step"] > 0 and seconds_of(Stage.STEP) in line]
    seconds = tokens = 0.0
    knots: list[list[int | float]] = []
    for line in trained:
        seconds, tokens = seconds + line[seconds_of(Stage.STEP)], tokens + line.get("step_tokens", 0.0)
        knots.append([line["step"], round(seconds, 2), int(tokens)])
    every = max(1, -(-len(knots) // MOST_KNOTS))
    return [[knots[0][0] - 1, 0, 0], *with_last(knots, every)] if knots else []


def with_last(values: Sequence[T], every: int) -> list[T]:
    """Return every n-th value, and the last."""
    return [*values[::every], *(values[-1:] if (len(values) - 1) % every else [])]


def in_words(series: Series) -> str:
    first, last = series.points[0], series.points[-1]
    values = [f"{value_text(point, series.style)} at step {number(point.step)}" for point in (first, last)]
    return ", ".join(values)


def value_text(point: Point, style: str) -> str:
    """Return the value of a point as text, without the lower edge of an area."""
    return number(point.value - (point.low or 0.0) if style == "area" else point.value)


@dataclass(frozen=True)
class Spark:
    """A small curve as the path of an SVG."""

    path: str
    words: str
    width: int = 120
    height: int = 28


def sparkline(points: Sequence[Point], label: str) -> Spark | None:
    """Return a small curve, or None for fewer than two points."""
    if len(points) < 2:
        return None
    every = -(-len(points) // MOST_SPARKS)
    some = with_last(points, every)
    values = [point.value for point in some]
    low, high, first, last = min(values), max(values), some[0].step, some[-1].step
    at = [
        (
            2 + (Spark.width - 4) * (point.step - first) / (last - first),
            Spark.height - 3 - (Spark.height - 6) * ((point.value - low) / (high - low) if high > low else 0.5),
        )
        for point in some
    ]
    words = f"{label} from {number(values[0])} to {number(values[-1])}"
    return Spark("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at), words)


def number(value: int | float) -> str:
    """Format a number for a reader: 0.25, 12, 16.38k, 1.2e-05."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10_000:
        return next(f"{value / unit:.4g}{letter}" for unit, letter in UNITS if size >= unit)
    return f"{value:.3g}" if size < 100 else f"{value:.0f}"


UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
