"""A change of a score between two models or two ends of a run, and its text for the user."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScoreSplit = Literal["held-out", "training"]

FEWEST = 8
"""With fewer values, an interval would be too narrow."""


@dataclass(frozen=True)
class Change:
    """The means of values before and after, with a 95% interval of their difference."""

    name: str
    before: float
    after: float
    low: float | None = None
    high: float | None = None
    num: int | None = None
    """Number of values: of pairs, or of values at the end that has fewer of them."""
    split: ScoreSplit | None = None
    """The data of a score."""

    @property
    def label(self) -> str:
        """The name with the split: `held-out reward`."""
        return self.name if self.split is None else f"{self.split} {self.name}"

    @property
    def has_few(self) -> bool:
        """Whether its interval is of so few values that it would be too narrow."""
        return self.num is not None and self.num < FEWEST


def text_of(change: Change) -> tuple[str, str]:
    """Return both means with two digits of the larger one, at least two decimals."""
    digits = digits_of(change.before, change.after)
    return f"{change.before:.{digits}f}", f"{change.after:.{digits}f}"


def interval(change: Change, digits: int | None = None) -> str:
    """Return the interval of a change, the reason why it has none, or an empty text. By default it has the digits of
    `text_of`."""
    if change.low is None or change.high is None:
        return ""
    if change.has_few:
        return f"too few values ({change.num})"
    digits = digits_of(change.before, change.after) if digits is None else digits
    return f"{change.low:+.{digits}f} to {change.high:+.{digits}f}"


def digits_of(*values: float) -> int:
    """Return the number of decimals that show two digits of the largest value, at least 2."""
    size = max(map(abs, values))
    return 2 if size == 0 else max(2, 1 - math.floor(math.log10(size)))
