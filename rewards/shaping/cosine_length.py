"""Reward for correct answers that depends on the length of the completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rewards.answers.choice import choice
from rewards.answers.exact_match import exact_match
from rewards.answers.numeric import numeric
from rewards.contract import Fault, RewardFunction, Score
from rewards.shaping.lengths import num_tokens
from rewards.text import TextOrMessages

JUDGES: dict[str, RewardFunction] = {"choice": choice, "exact_match": exact_match, "numeric": numeric}
"""Functions that can decide whether an answer is correct. They score a correct one 1.0, a wrong one less."""


def cosine_length(
    completions: Sequence[TextOrMessages],
    completion_ids: Sequence[Sequence[int]],
    solution: Sequence[Any],
    *,
    correct: str = "exact_match",
    max_len: int = 1000,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> list[Score]:
    """Return more for short correct answers than for long ones, and less for short wrong ones.

    The cosine reward of arXiv:2502.03373 with Open-R1's settings. An answer is correct if the built-in `correct` gives
    it 1.0. None and faults of this function are returned. Raises ValueError if a setting is invalid.
    """
    if correct not in JUDGES:
        raise ValueError(f"correct={correct!r} is none of {', '.join(JUDGES)}")
    if max_len < 1:
        raise ValueError(f"max_len={max_len} is not 1 token or more")
    values = (min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)
    if not -1e6 <= min_value_wrong <= max_value_wrong < min_value_correct <= max_value_correct <= 1e6:
        raise ValueError(f"a wrong answer must not score more than a correct one, nor min more than max: {values}")

    def scaled(score: Score, length: int | Fault) -> Score:
        if score is None or isinstance(score, Fault):
            return score
        if isinstance(length, Fault):
            return length
        ends = (max_value_correct, min_value_correct) if score >= 1.0 else (min_value_wrong, max_value_wrong)
        return cosine(length / max_len, *ends)

    scores = JUDGES[correct](completions, solution)
    return list(map(scaled, scores, map(num_tokens, completions, completion_ids)))


def cosine(progress: float, start: float, end: float) -> float:
    """Interpolate from `start` at 0 to `end` at 1 along half a cosine. The value stays at `end` after 1."""
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
