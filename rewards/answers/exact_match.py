"""Reward for an answer that is the solution, word for word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.text import TextOrMessages, answer_text, gold_text, score_golds


def exact_match(
    completions: Sequence[TextOrMessages], solution: Sequence[Any], *, ignore_case: bool = False
) -> list[Score]:
    """Return 1.0 if the answer equals `solution` up to whitespace, else 0.0; None if `solution` is None.

    The answer is the content of the last closed `<answer>` tag, or the whole completion if there is none. The solution
    is read in the same way, so `<answer>7</answer>` and `7` are the same gold answer.
    """

    def score(text: str, gold: str) -> float:
        answer, expected = (" ".join(answer_text(side).split()) for side in (text, gold))
        if ignore_case:
            answer, expected = answer.casefold(), expected.casefold()
        return float(answer != "" and answer == expected)

    return score_golds(completions, map(gold_text, solution), score)
