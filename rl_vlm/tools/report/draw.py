"""Charts as the coordinates of an SVG, which the page's template writes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rl_vlm.log.curve import Point, Series
from rl_vlm.tools.report.curves import Chart

WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24


@dataclass(frozen=True)
class Tick:
    """A grid line with its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """A drawn series."""

    label: str
    color: int
    style: str
    path: str
    band: str
    dots: list[tuple[float, float]]
    bars: list[tuple[float, float, float]]
    """x and both ends of each dot's interval."""
    latest: str


@dataclass(frozen=True)
class Drawing:
    """A chart in pixels."""

    title: str
    note: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    summary: str
    """The chart in words, for readers who do not see it."""
    data: str
    """Points as JSON, which the page shows under the pointer."""


class Scale:
    """Converts values of an axis to pixels."""

    def __init__(self, low: int | float, high: int | float, start: int | float, end: int | float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: int | float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int) -> list[Tick]:
        """Return ticks at round numbers."""
        return [Tick(self(value), number(value)) for value in round_numbers(self.low, self.high, most)]


def draw(chart: Chart) -> Drawing:
    """Draw a chart."""
    points = [point for series in chart.series for point in series.points]
    values = [value for p in points for value in (p.value, p.low, p.high) if value is not None]
    steps = [p.step for p in points]
    x = Scale(*spread(min(steps), max(steps), 0.0), LEFT, WIDTH - RIGHT)
    y = Scale(*value_range(min(values), max(values)), HEIGHT - BOTTOM, TOP)
    lines = [draw_series(series, x, y) for series in chart.series]
    summary = "; ".join(described(series) for series in chart.series)
    data = {
        "steps": [x.low, x.high],
        "series": [
            {"label": s.label, "points": [[p.step, number(p.value - area_base(p, s))] for p in s.points]}
            for s in chart.series
        ],
    }
    return Drawing(
        chart.title, chart.note, lines, whole(x.ticks(6)), y.ticks(5), f"{chart.title}. {summary}", json.dumps(data)
    )


def area_base(point: Point, series: Series) -> float:
    """Return the lower edge of an area, which is not part of its value; 0 for other styles."""
    return (point.low or 0.0) if series.style == "area" else 0.0


def draw_series(series: Series, x: Scale, y: Scale) -> Line:
    """Draw a series as a line with a band, as an area, or as dots with bars."""
    points = series.points
    at = [(x(p.step), y(p.value)) for p in points]
    banded = [p for p in points if p.low is not None and p.high is not None]
    edge = [(x(p.step), y(p.high or 0.0)) for p in banded] + [(x(p.step), y(p.low or 0.0)) for p in reversed(banded)]
    is_dots = series.style == "dots"
    last = points[-1]
    return Line(
        series.label,
        series.color,
        series.style,
        path(at),
        "" if is_dots or len(banded) < 2 else path(edge) + "Z",
        at if is_dots or len(at) == 1 else [],
        [(x(p.step), y(p.low or 0.0), y(p.high or 0.0)) for p in banded] if is_dots else [],
        number(last.value - area_base(last, series)),
    )


def path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""


def described(series: Series) -> str:
    first, last = series.points[0], series.points[-1]
    values = [number(point.value - area_base(point, series)) for point in (first, last)]
    return f"{series.label}: {values[0]} at step {number(first.step)}, {values[1]} at step {number(last.step)}"


def spread(low: int | float, high: int | float, margin: int | float) -> tuple[int | float, int | float]:
    """Add a margin to a range, and widen an empty one."""
    size = (high - low) or abs(high) or 1.0
    return (low, high if high > low else low + size) if not margin else (low - margin * size, high + margin * size)


def value_range(low: int | float, high: int | float) -> tuple[int | float, int | float]:
    """Return the range of the vertical axis. It begins at 0 if the least value is from 0 to half of the largest."""
    if 0 <= low < 0.5 * high or low == high == 0:
        return 0.0, (high or 1.0) * 1.05
    return spread(low, high, 0.08)


def round_numbers(low: int | float, high: int | float, most: int) -> list[float]:
    """Return at most about `most` multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def whole(ticks: Sequence[Tick]) -> list[Tick]:
    """Leave out ticks between optimizer steps."""
    return [tick for tick in ticks if "." not in tick.label]


def number(value: int | float) -> str:
    """Format a number for an axis: 0.25, 12, 16k, 1.2e-05."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10_000:
        return next(f"{value / unit:.4g}{letter}" for unit, letter in UNITS if size >= unit)
    return f"{value:.3g}" if size < 100 else f"{value:.0f}"


UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
