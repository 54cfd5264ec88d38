"""Penalty for completions that repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

from rewards.contract import Score
from rewards.shaping.lengths import num_tokens
from rewards.text import TextOrMessages, completion_text


def repetition(
    completions: Sequence[TextOrMessages],
    completion_ids: Sequence[Sequence[int]],
    *,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
    unit: Literal["words", "tokens"] = "words",
) -> list[Score]:
    """Return `max_penalty` times the share of repeated n-grams, between `max_penalty` and 0.0.

    See arXiv:2502.03373, appendix C.2. Raises ValueError if a setting is invalid.
    """
    if ngram_size < 1:
        raise ValueError(f"ngram_size={ngram_size} is not 1 or more")
    if not -1e6 <= max_penalty <= 0:
        raise ValueError(f"max_penalty={max_penalty} is not a number between -1e6 and 0; a penalty is negative")
    if unit not in ("words", "tokens"):
        raise ValueError(f"unit={unit!r} is neither 'words' nor 'tokens'")
    if unit == "words":
        return [_penalty(completion_text(c).lower().split(), ngram_size, max_penalty) for c in completions]
    return [
        length if not isinstance(length := num_tokens(c, ids), int) else _penalty(ids, ngram_size, max_penalty)
        for c, ids in zip(completions, completion_ids, strict=True)
    ]


def _penalty(units: Sequence[Any], ngram_size: int, max_penalty: float) -> float:
    total = len(units) - ngram_size + 1
    if total < 1:
        return 0.0
    distinct = set(zip(*(islice(units, start, None) for start in range(ngram_size)), strict=False))
    return max_penalty * (total - len(distinct)) / total + 0.0  # no -0.0
