"""Penalty for completions that are too long."""

from __future__ import annotations

from collections.abc import Sequence

from rewards.contract import Fault, Score
from rewards.shaping.lengths import num_tokens
from rewards.text import TextOrMessages


def overlong(
    completions: Sequence[TextOrMessages],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_completion_length: int = 0,
    soft_punish_cache: int = 0,
) -> list[Score]:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), between -1.0 and 0.0.

    Lengths are in tokens. Raises ValueError if max_completion_length is not set, or unless 0 <= soft_punish_cache <=
    max_completion_length.
    """
    if max_completion_length <= 0:
        raise ValueError("overlong needs `max_completion_length` in its kwargs: the length from which it gives -1.0")
    if not 0 <= soft_punish_cache <= max_completion_length:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache} is not between 0 and max_completion_length={max_completion_length}"
        )
    return [
        _punishment(num_tokens(completion, ids), max_completion_length, soft_punish_cache)
        for completion, ids in zip(completions, completion_ids, strict=True)
    ]


def _punishment(length: int | Fault, maximum: int, cache: int) -> Score:
    if isinstance(length, Fault):
        return length
    if length > maximum:
        return -1.0
    excess = length - (maximum - cache)
    return -excess / cache if excess > 0 else 0.0
