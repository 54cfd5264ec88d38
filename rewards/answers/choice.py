"""Reward for multiple choice: the answer names the right option."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.contract import Fault, Score
from rewards.text import Completion, answer_text, completion_text, gold_text

STATEMENT = re.compile(r"(?i)\b(?:answer|option|choice)(?: is:?|:) ?(?:(?:option|choice) )?")
NO_TEXTS: Mapping[str, str] = {}


def choice(
    completions: Sequence[Completion],
    solution: Sequence[Any],
    options: Sequence[Any] | None = None,
    choices: Sequence[Any] | None = None,
    *,
    letters: str = "ABCDEFGHIJ",
) -> list[Score]:
    """Return 1.0 if the answer names the option that `solution` names, else 0.0; None if `solution` names none.

    Options are named by one of `letters`, in either case. If the row has the options' texts in its column `options` or
    `choices`, a list or a dict by letter, they are named by their text as well. An answer that names several options,
    or none, scores 0.0. A solution that is none of the row's options is a fault.
    """
    columns = [column for column in (options, choices) if column is not None]
    given = [next((v for v in values if v is not None), None) for values in zip(*columns, strict=True)]
    return [
        _chooses(completion_text(completion), gold_text(gold), option_texts(row, letters), letters)
        for completion, gold, row in zip(completions, solution, given or [None] * len(completions), strict=True)
    ]


def _chooses(text: str, gold: str | Fault | None, texts: dict[str, str] | Fault, letters: str) -> Score:
    if not isinstance(gold, str):
        return gold
    if isinstance(texts, Fault):
        return texts
    right = named_option(gold, letters, texts)
    if texts and right not in texts:
        return Fault("type", f"`solution` is {gold[:60]!r}, none of the row's options, or several")
    return None if right is None else float(named_option(text, letters, texts) == right)


def option_texts(options: Any, letters: str) -> dict[str, str] | Fault:
    """Return the texts of a row's options by letter, in the form in which they are compared; a fault if they have none.

    A text may begin with its own letter, as in `A. a dog`. Letters whose text is None are left out.
    """
    options = options.tolist() if hasattr(options, "tolist") else options  # NumPy arrays
    if isinstance(options, list | tuple):
        options = dict(zip(letters, options, strict=False)) if len(options) <= len(letters) else None
    elif options is None:
        options = {}
    if not isinstance(options, dict) or not {str(letter).upper() for letter in options} <= set(letters.upper()):
        return Fault("type", f"the options are neither a list of up to {len(letters)} texts nor a dict by letter")
    by_letter = {str(letter).upper(): str(text) for letter, text in options.items() if text is not None}
    return {
        letter: _comparable(re.sub(rf"(?i)^\s*(?:\({letter}\)|\[{letter}\]|{letter}[.):])\s+", "", text))
        for letter, text in by_letter.items()
    }


def _plain(text: str) -> str:
    return " ".join(text.replace("*", "").replace("`", "").split())


def _comparable(text: str) -> str:
    return _plain(text).casefold().rstrip(" .,;:!?。")


def named_option(text: str, letters: str, texts: Mapping[str, str] = NO_TEXTS) -> str | None:
    """Return the one option that a text names, or None if it names none or several.

    Examples: `B`, `(b)`, `**B**`, `B. a dog`, `The answer is (B) a dog`, and `a dog` if that is B's text. Reads the
    last closed `<answer>` tag, or the whole text if there is none; in it, only what follows each "answer is", if there
    is one.
    """
    words = _plain(answer_text(text))
    if _comparable(words) in texts.values():
        return _option(words, letters, texts)
    before, *statements = STATEMENT.split(words)
    options = {_option(part, letters, texts) for part in statements or [before]} - {None}
    return options.pop() if len(options) == 1 else None


def _option(text: str, letters: str, texts: Mapping[str, str]) -> str | None:
    """Return the option with this text, or the letter at its start. A letter alone names its option, not a text."""
    comparable = _comparable(text)
    named = [letter for letter, option in texts.items() if option == comparable != ""]
    is_letter = len(comparable) == 1 and comparable.upper() in letters.upper()
    if named and not is_letter:
        return named[0] if len(named) == 1 else None
    return _leading_option(text, letters)


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
