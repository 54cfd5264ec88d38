"""Reads intervals and moments of videos in completions and gold answers, to draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.temporal.intervals import Clock, Interval, gold_intervals, gold_moment, read_intervals, read_moment

INTERVALS = ("temporal_iou", "temporal_recall")
"""Built-in functions that read intervals."""
MOMENTS = ("time_distance",)
"""Built-in functions that read one moment."""


@dataclass(frozen=True)
class Intervals:
    """Reads intervals from rows of a completions file, like the reward functions of the run."""

    of_moments: bool = False
    """Whether answers are moments. A moment is an interval without a length."""
    of_frames: bool = False
    """Whether gold answers are numbers of frames."""

    @classmethod
    def of_rewards(cls, reward_funcs: Sequence[str | Mapping[str, Any]]) -> Intervals | None:
        """Build the reader from the setting `rewards.reward_funcs`. Return None if no function reads intervals."""
        entries: list[Mapping[str, Any]] = [
            {"function": spec} if isinstance(spec, str) else spec for spec in reward_funcs
        ]
        for functions in (INTERVALS, MOMENTS):
            for entry in entries:
                if entry["function"] in functions:
                    kwargs = entry.get("kwargs") or {}
                    return cls(functions is MOMENTS, kwargs.get("solution_times") == "frames")
        return None

    def predicted(self, row: Mapping[str, Any]) -> list[Interval]:
        """Return the intervals of a row's completion, in seconds of the file. Empty if it has none."""
        if not self.of_moments:
            return read_intervals(row["completion"])
        return as_intervals(read_moment(row["completion"]))

    def gold(self, row: Mapping[str, Any]) -> list[Interval]:
        """Return the intervals of the row's `solution`. Empty if it has none that can be read."""
        solution = row.get("data/solution")
        times = (row.get("video_frame_times") or [()])[0]
        clock = Clock(times) if self.of_frames else None
        found = as_intervals(gold_moment(solution, clock)) if self.of_moments else gold_intervals(solution, clock)
        return found if isinstance(found, list) else []


def as_intervals(moment: Any) -> list[Interval]:
    """Return a moment as an interval. Return none without a moment."""
    return [Interval(moment, moment)] if isinstance(moment, float) else []
