"""Reward for a text that is close to the gold text, character by character."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rewards.contract import Score
from rewards.overlap.references import best_scores, normalized
from rewards.text import TextOrMessages

LONGEST_RATIO = 10
"""If an answer is more than this many times as long as the gold text, it scores 0.0 instead of less than 1 / 10."""


def edit_similarity(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    *,
    ignore_case: bool = False,
    normalize_whitespace: bool = True,
) -> list[Score]:
    """Return 1 - d / max(|answer|, |gold|), where d is the Levenshtein distance; None if there is no gold text."""
    prepare = partial(normalized, ignore_case=ignore_case, normalize_whitespace=normalize_whitespace)
    return best_scores(completions, solution, prepare, similarity)


def similarity(answer: str, gold: str) -> float:
    """Return the normalised Levenshtein similarity of an answer to a gold text that is not empty."""
    from rapidfuzz.distance import Levenshtein

    if len(answer) > LONGEST_RATIO * len(gold):
        return 0.0
    return Levenshtein.normalized_similarity(answer, gold)
