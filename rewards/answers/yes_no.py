"""Reward for a correct yes or no."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rewards.contract import Fault, Score
from rewards.text import TextOrMessages, answer_text, gold_text, score_golds

MARKS = str.maketrans("", "", "*_`\"'“”‘’")
STATEMENT = r"answer(?: is)?(?:\s*:|\s)"
FIRST_WORD = re.compile(
    rf"(?:(?:the |my )?(?:final |correct )?{STATEMENT}\s*)?(yes|no|true|false)\s*(?:$|[.,;:!()\n–—]|- )(.*)",
    re.DOTALL | re.IGNORECASE,
)
SECOND_ANSWER = re.compile(
    r"\W*(?:(?:and|or|but|also|maybe|perhaps|then|actually|wait|rather)\b\W*)*(?:yes|no|true|false)\b", re.IGNORECASE
)
STATED = re.compile(rf"\b{STATEMENT}\s*(yes|no|true|false)\b", re.IGNORECASE)


def yes_no(completions: Sequence[TextOrMessages], solution: Sequence[Any]) -> list[Score]:
    """Return 1.0 if the answer begins with yes or no, as `solution` does, else 0.0; None if `solution` is None.

    "True" means yes and "false" means no. A solution that is neither yes nor no is a fault.
    """
    return score_golds(completions, map(gold_text, solution), _agrees)


def _agrees(text: str, gold: str) -> Score:
    expected = says_yes(gold)
    if expected is None:
        return Fault("type", f"`solution` is {gold[:60]!r}, neither yes nor no")
    return float(says_yes(text) is expected)


def says_yes(text: str) -> bool | None:
    """Return True for yes, False for no, and None for an answer that is neither, or both.

    The first word decides, after "The answer is" if the text begins so. It must stand alone or before a punctuation
    mark: "No idea" is not an answer. The word does not count if a second one follows, as in "Yes, or no", or if the
    contrary is stated later, as in "Yes. The answer is no".
    """
    match = FIRST_WORD.match(answer_text(text).translate(MARKS).strip())
    if match is None or SECOND_ANSWER.match(match[2]):
        return None
    said = {word.lower() in ("yes", "true") for word in (match[1], *STATED.findall(match[2]))}
    return said.pop() if len(said) == 1 else None
