"""Reward for intervals of a video: intersection over union in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.temporal.intervals import Interval, SolutionTimes, gold_intervals, read_intervals, score_rows
from rewards.text import TextOrMessages


def temporal_iou(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    video_frame_times: Sequence[Any] | None = None,
    *,
    solution_times: SolutionTimes = "seconds",
) -> list[Score]:
    """Return the IoU of the predicted and the gold interval, in seconds of the file.

    With `solution_times="frames"`, the gold interval has numbers of the frames that the model gets, from 0.

    If there are several intervals, match each prediction to one gold interval, largest IoU first. The score is the sum
    of IoUs over the larger number of intervals, so that an extra prediction lowers it.
    """
    return score_rows((completions, solution, video_frame_times), solution_times, gold_intervals, _iou)


def _iou(text: str, gold: list[Interval]) -> float:
    predicted = read_intervals(text)
    return sum(matched(predicted, gold)) / max(len(predicted), len(gold))


def matched(predicted: Sequence[Interval], gold: Sequence[Interval]) -> list[float]:
    """Match predicted to gold intervals one to one, largest IoU first, and return the IoUs."""
    pairs = [(one.iou(other), i, j) for i, one in enumerate(predicted) for j, other in enumerate(gold)]
    values, used, met = [], set(), set()
    for value, i, j in sorted(pairs, reverse=True):
        if value > 0 and i not in used and j not in met:
            values.append(value)
            used.add(i)
            met.add(j)
    return values
