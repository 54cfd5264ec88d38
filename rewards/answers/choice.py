"""Reward for multiple choice: the answer names the right option."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rewards.contract import Fault, Score
from rewards.text import Completion, answer_text, completion_text, gold_text

STATEMENT = re.compile(r"(?i)\b(?:answer|option|choice)(?: is:?|:) ?(?:(?:option|choice) )?")


def choice(completions: Sequence[Completion], solution: Sequence[Any], *, letters: str = "ABCDEFGHIJ") -> list[Score]:
    """Return 1.0 if the answer names the option that `solution` names, else 0.0; None if `solution` names none.

    Options are named by one of `letters`, in either case. An answer that names several options, or none, scores 0.0.
    """
    return [
        _chooses(completion_text(completion), gold_text(gold), letters)
        for completion, gold in zip(completions, solution, strict=True)
    ]


def _chooses(text: str, gold: str | Fault | None, letters: str) -> Score:
    if not isinstance(gold, str):
        return gold
    right = named_option(gold, letters)
    return None if right is None else float(named_option(text, letters) == right)


def named_option(text: str, letters: str) -> str | None:
    """Return the one option that a text names, or None if it names none or several.

    Examples: `B`, `(b)`, `**B**`, `B. a dog`, `The answer is (B) a dog`. Reads the last closed `<answer>` tag, or the
    whole text if there is none; in it, only what follows each "answer is", if there is one.
    """
    words = " ".join(answer_text(text).replace("*", "").replace("`", "").split())
    before, *statements = STATEMENT.split(words)
    options = {_leading_option(part, letters) for part in statements or [before]} - {None}
    return options.pop() if len(options) == 1 else None


def _leading_option(text: str, letters: str) -> str | None:
    """Return the option at the start of the text, or None if there is none or other options are listed after it."""
    letter = f"[{letters}{letters.lower()}]"
    leading = re.match(rf"[(\[]({letter})[)\]]|({letter})(?=[.):]|,? (?:because|since)\b|$)", text)
    if leading is None:
        return None
    option = leading[leading.lastindex or 0].upper()
    rest = text[leading.end() :].lstrip(" .):,").rstrip(" .")
    listed = re.findall(rf"[(\[]({letter})[)\]]|(?<![\w.])({letter})[.):](?: |$)|^({letter})$", rest)
    return option if {"".join(groups).upper() for groups in listed} <= {option} else None
