"""Reward for a moment of a video."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.temporal.intervals import SolutionTimes, gold_moment, read_moment, score_rows
from rewards.text import TextOrMessages


def time_distance(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    video_frame_times: Sequence[Any] | None = None,
    *,
    scale: float = 1.0,
    solution_times: SolutionTimes = "seconds",
) -> list[Score]:
    """Return exp(-|a - g| / scale), where a is the predicted and g the gold second, or 0.0 without a prediction.

    With `solution_times="frames"`, the gold answer is the number of a frame that the model gets, from 0. Raises
    ValueError for a scale that is not above 0.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}, expected a number above 0")

    def score(text: str, gold: float) -> float:
        found = read_moment(text)
        return 0.0 if found is None else math.exp(-abs(found - gold) / scale)

    return score_rows((completions, solution, video_frame_times), solution_times, gold_moment, score)
