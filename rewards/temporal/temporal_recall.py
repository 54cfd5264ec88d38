"""Reward for intervals of a video that are found well enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.temporal.intervals import SolutionTimes, clocks, gold_intervals, read_intervals
from rewards.temporal.temporal_iou import matched
from rewards.text import Completion, completion_text


def temporal_recall(
    completions: Sequence[Completion],
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
    scores: list[Score] = []
    read = clocks(solution_times, video_frame_times, len(completions))
    for completion, given, clock in zip(completions, solution, read, strict=True):
        gold = gold_intervals(given, clock)
        if not isinstance(gold, list):
            scores.append(gold)
            continue
        values = matched(read_intervals(completion_text(completion))[: len(gold)], gold)
        scores.append(sum(value >= threshold for value in values) / len(gold))
    return scores
