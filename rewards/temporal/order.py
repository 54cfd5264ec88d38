"""Reward for a sequence, such as events in the order in which they happen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from rewards.contract import Fault, Score, plain
from rewards.text import TextOrMessages, answer_text, completion_text

SEPARATOR = re.compile(r"\s*(?:,|;|->|→|>|\n)\s*")
MOST = 100
"""Items of a sequence."""


def order(completions: Sequence[TextOrMessages], solution: Sequence[Any]) -> list[Score]:
    """Return Kendall's tau of the predicted and the gold sequence, or 0.0 if it is negative (Kendall 1938).

    It is 0.0 if the answer does not have each item of the gold sequence once, and no other.
    """
    return [_score(completion_text(one), plain(gold)) for one, gold in zip(completions, solution, strict=True)]


def _score(text: str, gold: Any) -> Score:
    if gold is None or gold != gold:
        return None
    items = [str(item).strip().lower() for item in gold] if isinstance(gold, list | tuple) else read_items(str(gold))
    if not 2 <= len(set(items)) == len(items) <= MOST:
        return Fault("type", f"`solution` is {str(gold)[:60]!r}, no sequence of 2 to {MOST} different items")
    found = read_items(text)
    if sorted(found) != sorted(items):
        return 0.0
    places = {item: place for place, item in enumerate(found)}
    pairs = list(combinations(items, 2))
    return max(0.0, sum(1 if places[one] < places[other] else -1 for one, other in pairs) / len(pairs))


def read_items(text: str) -> list[str]:
    """Return the items of an answer, which commas, semicolons, arrows or lines separate, or else single spaces."""
    answer = answer_text(text).strip("[]() .").lower()
    items = SEPARATOR.split(answer) if SEPARATOR.search(answer) else answer.split()
    return [item.strip("\"' ") for item in items if item.strip("\"' ")]
