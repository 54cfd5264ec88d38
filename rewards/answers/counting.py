"""Reward for the correct count."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from rewards.contract import Fault, Score
from rewards.text import TextOrMessages, answer_text, gold_text, score_golds

WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
OTHER_NUMBERS = (
    "no.one thirty forty fifty sixty seventy eighty ninety hundreds? thousands? millions? billions? trillions? dozens? "
    "half halves thirds? quarters?"
).split()
"""Numbers that are not counts. "No one" does not mean 1."""
# Digits are spelled [0-9]: \d and int() accept digits of every script.
NUMBER = re.compile(
    rf"[-−]?\.?[0-9](?:[0-9.,]*[0-9])?(?:(?:k|m|bn?)\b)?|\b(?:{'|'.join(OTHER_NUMBERS + WORDS)})\b", re.IGNORECASE
)
INTEGER = re.compile(r"([0-9]{1,15}|[0-9]{1,3}(?:,[0-9]{3}){1,4})(?:\.0{1,15})?")
NONE = re.compile(r"(?:none|there are no(?: [\w'-]{1,30}){1,8})[.!]?", re.IGNORECASE)
"""Answers without a number that mean 0."""


def counting(completions: Sequence[TextOrMessages], solution: Sequence[Any], *, partial: bool = False) -> list[Score]:
    """Return 1.0 if the answer has the number `solution` and no other, else 0.0; None if `solution` is None.

    If `partial` is True, a wrong count a scores max(0, 1 - |a - g| / g), where g is the solution. A solution that is
    not a count is a fault.
    """

    def score(text: str, gold: str) -> Score:
        expected, count = read_count(gold), read_count(text)
        if expected is None:
            return Fault("type", f"`solution` is {gold[:60]!r}, not one integer of 0 or more")
        if count is None or count == expected or not partial:
            return float(count == expected)
        return max(0.0, 1 - abs(count - expected) / expected) if expected else 0.0

    return score_golds(completions, map(gold_text, solution), score)


def read_count(text: str) -> int | None:
    """Return the only number of an answer, in digits or as a word. Return None if there is no one count."""
    answer = answer_text(text)
    numbers = NUMBER.findall(answer)
    if not numbers and NONE.fullmatch(answer):
        return 0
    foreign = (c for c in answer if not c.isascii())  # such as `½`, `²`, `Ⅶ` and `٧`
    if len(numbers) != 1 or any(unicodedata.category(c).startswith("N") for c in foreign):
        return None
    if numbers[0].lower() in WORDS:
        return WORDS.index(numbers[0].lower())
    integer = INTEGER.fullmatch(numbers[0])
    return int(integer[1].replace(",", "")) if integer else None
