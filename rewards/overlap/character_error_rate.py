"""Reward for a text with few wrong characters, as OCR and speech recognition are measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rewards.contract import Score
from rewards.overlap.references import best_scores, normalized
from rewards.text import TextOrMessages


def character_error_rate(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    *,
    ignore_case: bool = False,
    normalize_whitespace: bool = True,
) -> list[Score]:
    """Return max(0, 1 - CER), where CER is the Levenshtein distance / |gold|; None if there is no gold text."""
    prepare = partial(normalized, ignore_case=ignore_case, normalize_whitespace=normalize_whitespace)
    return best_scores(completions, solution, prepare, accuracy)


def accuracy(answer: str, gold: str) -> float:
    """Return max(0, 1 - CER) of an answer to a gold text that is not empty."""
    from rapidfuzz.distance import Levenshtein

    if len(answer) >= 2 * len(gold):
        return 0.0  # at least |gold| characters are inserted
    return max(0.0, 1 - Levenshtein.distance(answer, gold) / len(gold))
