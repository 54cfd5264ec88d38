"""Reward for an answer that is the solution, word for word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Fault, Score
from rewards.text import Completion, answer_text, completion_text, gold_text


def exact_match(
    completions: Sequence[Completion], solution: Sequence[Any], *, ignore_case: bool = False
) -> list[Score]:
    """Return 1.0 if the answer equals `solution` up to whitespace, else 0.0; None if `solution` is None.

    The answer is the content of the last closed `<answer>` tag, or the whole completion if there is none. The solution
    is read in the same way, so `<answer>7</answer>` and `7` are the same gold answer.
    """
    return [
        _matches(completion_text(completion), gold_text(gold), ignore_case)
        for completion, gold in zip(completions, solution, strict=True)
    ]


def _matches(text: str, gold: str | Fault | None, ignore_case: bool) -> Score:
    if not isinstance(gold, str):
        return gold
    answer, expected = (" ".join(answer_text(side).split()) for side in (text, gold))
    if ignore_case:
        answer, expected = answer.casefold(), expected.casefold()
    return float(answer != "" and answer == expected)
