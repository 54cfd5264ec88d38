"""Reward for a short answer in words."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from rewards.contract import Score
from rewards.overlap.references import best_scores
from rewards.text import TextOrMessages

ARTICLE = re.compile(r"\b(?:a|an|the)\b")
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
IN_NUMBER = re.compile(r"(?<=[0-9])[.,:/-](?=[0-9])|(?<![\w-])-(?=\.?[0-9])|(?<![\w.])\.(?=[0-9])")
"""Marks that are part of a number: in `1.5` or `12:30`, a minus, and the point of `.5`."""


def short_answer(
    completions: Sequence[TextOrMessages], solution: Sequence[Any], *, metric: Literal["exact", "f1"] = "exact"
) -> list[Score]:
    """Return SQuAD's exact match or token F1 with the best of the row's aliases; None if there is none.

    Raises ValueError if `metric` is neither `exact` nor `f1`.
    """
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is neither 'exact' nor 'f1'")
    return best_scores(completions, solution, words, METRICS[metric])


def words(text: str) -> list[str]:
    """Return the words of a text as SQuAD compares them: in lower case, without punctuation and articles.

    Unlike SQuAD, it removes the punctuation of all scripts, and keeps marks within numbers and texts of articles only.
    """
    text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text.lower().replace("−", "-").replace("–", "-"))
    in_number = {mark.start() for mark in IN_NUMBER.finditer(text)}
    text = "".join(c for place, c in enumerate(text) if place in in_number or not _is_punctuation(c))
    return ARTICLE.sub(" ", text).split() or text.split()


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def exact(answer: list[str], gold: list[str]) -> float:
    """Return 1.0 if both are equal, else 0.0."""
    return float(answer == gold)


def f1(answer: list[str], gold: list[str]) -> float:
    """Return 2PR / (P + R) of the common words, which is 2 common / (|answer| + |gold|)."""
    common = (Counter(answer) & Counter(gold)).total()
    return 2 * common / (len(answer) + len(gold))


METRICS = {"exact": exact, "f1": f1}
