"""Reward for a short answer in words."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from rewards.contract import Score
from rewards.overlap.references import best_scores
from rewards.text import Completion

ARTICLE = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def short_answer(
    completions: Sequence[Completion], solution: Sequence[Any], *, metric: Literal["exact", "f1"] = "exact"
) -> list[Score]:
    """Return SQuAD's exact match or token F1 with the best of the row's aliases; None if there is none.

    Raises ValueError if `metric` is neither `exact` nor `f1`.
    """
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is neither 'exact' nor 'f1'")
    return best_scores(completions, solution, words, METRICS[metric])


def words(text: str) -> list[str]:
    """Return the words of a text as SQuAD compares them: in lower case, without ASCII punctuation and articles."""
    return ARTICLE.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def exact(answer: list[str], gold: list[str]) -> float:
    """Return 1.0 if both are equal, else 0.0."""
    return float(answer == gold)


def f1(answer: list[str], gold: list[str]) -> float:
    """Return 2PR / (P + R) of the words that both have, which is 2 common / (|answer| + |gold|)."""
    common = (Counter(answer) & Counter(gold)).total()
    return 2 * common / (len(answer) + len(gold))


METRICS = {"exact": exact, "f1": f1}
