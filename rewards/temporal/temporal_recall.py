"""Reward for intervals of a video that are found well enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.temporal.intervals import Interval, SolutionTimes, gold_intervals, read_intervals, score_rows
from rewards.temporal.temporal_iou import matched
from rewards.text import TextOrMessages


def temporal_recall(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    video_frame_times: Sequence[Any] | None = None,
    *,
    threshold: float = 0.5,
    solution_times: SolutionTimes = "seconds",
) -> list[Score]:
    """Return the fraction of gold intervals that a prediction meets with an IoU of `threshold` or more.

    With n gold intervals, only the first n predictions count. `solution_times` works as in `temporal_iou`.
    Raises ValueError for a threshold outside of (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}, expected more than 0 and at most 1")

    def recall(text: str, gold: list[Interval]) -> float:
        values = matched(read_intervals(text)[: len(gold)], gold)
        return sum(value >= threshold for value in values) / len(gold)

    return score_rows((completions, solution, video_frame_times), solution_times, gold_intervals, recall)
