"""Reward for multiple choice: the answer names the right option."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rewards.contract import Fault, Score, plain
from rewards.text import TextOrMessages, answer_text, completion_text, gold_text

FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | str.maketrans("。、【】", "..[]")
"""Full-width forms and Chinese punctuation, with their replacements."""
STATEMENT = re.compile(
    r"""(?ix) (?: \b(?:answer|option|choice) (?: [ ](?:is|should[ ]be|must[ ]be|would[ ]be)\b:? | : )
      | \bI(?:'d|[ ]would)?[ ](?:choose|pick|select)\b | (?:答案|选项)(?:是|为|:) | 选择?项? )
    \s? (?:(?:clearly|definitely|obviously|probably|likely|therefore|thus)\s)?"""
)
PREFIX = re.compile(r"(?i)[#\s]*(?:(?:the )?(?:(?:final|correct|best) )?(?:answer|option|choice)\s)?")
JOINED = r"[\s,/&.:;|()\[\]+-]|\b(?:or|and|also|maybe|perhaps|then|option|answer|choice)\b"
EMPHASIS = str.maketrans("", "", "*`")
NO_TEXTS: Mapping[str, str] = {}


def choice(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    options: Sequence[Any] | None = None,
    choices: Sequence[Any] | None = None,
    *,
    letters: str = "ABCDEFGHIJ",
    solution_is: Literal["answer", "index"] = "answer",
) -> list[Score]:
    """Return 1.0 if the answer names the option that `solution` names, else 0.0; None if `solution` names none.

    One of `letters` names an option, in either case. If the row has the options' texts in its column `options` or
    `choices`, as a list or a dict by letter, the text names it as well. An answer that names several options, or none,
    scores 0.0. A solution that is not one of the row's options is a fault. With `solution_is="index"`, `solution` is
    the option's index, an int from 0. Raises ValueError if a setting is invalid.
    """
    if solution_is not in ("answer", "index"):
        raise ValueError(f"solution_is={solution_is!r} is neither 'answer' nor 'index'")
    if len(set(letters.upper())) != len(letters) or len(letters) < 2:
        raise ValueError(f"letters={letters!r} must be two or more different letters")
    columns = [column for column in (options, choices) if column is not None]
    given = [next((v for v in values if v is not None), None) for values in zip(*columns, strict=True)]

    rows = zip(completions, solution, given or [None] * len(completions), strict=True)

    def chooses(completion: TextOrMessages, gold: Any, row: Any) -> Score:
        texts = option_texts(row, letters)
        read = _letter_at(plain(gold), letters) if solution_is == "index" else _no_number(plain(gold), texts)
        return _chooses(completion_text(completion), read, texts, letters)

    return [chooses(*row) for row in rows]


def _letter_at(gold: Any, letters: str) -> str | Fault | None:
    """Return the letter of an option by its index. Return None without a solution, or a fault if it is not an index."""
    text = gold_text(gold)
    if not isinstance(text, str):
        return text
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(letters):
        return letters[gold]
    return Fault("type", f"`solution` is {text[:60]!r}, not the place of an option, an int from 0")


def _no_number(gold: Any, texts: dict[str, str] | Fault) -> str | Fault | None:
    """Return a solution as text. If the row has options, an int is a fault: it may be an index or a text."""
    if isinstance(gold, int) and not isinstance(gold, bool) and texts:
        advice = "set `solution_is` to 'index' if it counts options from 0, else make it the option's letter or text"
        return Fault("type", f"`solution` is the int {str(gold)[:20]} in a row with options: {advice}")
    return gold_text(gold)


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
    """Return the texts of a row's options by letter, normalized for comparison, or a fault if the options have none.

    A text may begin with its own letter, as in `A. a dog`. If a letter's text is None, the letter is left out.
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


def _lines(text: str) -> str:
    """Normalize a text: remove emphasis and empty lines, and use half-width characters and single spaces."""
    lines = (" ".join(line.split()) for line in text.translate(FULL_WIDTH | EMPHASIS).splitlines())
    return "\n".join(filter(None, lines))


def _comparable(text: str) -> str:
    return " ".join(_lines(text).split()).casefold().rstrip(" .,;:!?")


def named_option(text: str, letters: str, texts: Mapping[str, str] = NO_TEXTS) -> str | None:
    """Return the one option that a text names, or None if it names none or several.

    Examples: `B`, `(b)`, `**B**`, `B. a dog`, `The answer is (B) a dog`, and `a dog` if that is B's text. Reads the
    last closed `<answer>` tag, or the whole text if there is none. If it contains "answer is", only the text after each
    one counts.
    """
    words = _lines(answer_text(text))
    if _comparable(words) in texts.values():
        return _option(words, letters, texts)
    before, *statements = STATEMENT.split(words)
    options = {_option(part, letters, texts) for part in statements or [before]} - {None}
    return options.pop() if len(options) == 1 else None


def _option(text: str, letters: str, texts: Mapping[str, str]) -> str | None:
    """Return the option with this text, or the letter at its start. A letter alone always means its own option."""
    comparable = _comparable(text)
    named = [letter for letter, option in texts.items() if option == comparable != ""]
    if named and not _is_letter(comparable, letters):
        return named[0] if len(named) == 1 else None
    return _leading_option(PREFIX.sub("", text, count=1), letters, texts)


def _is_letter(text: str, letters: str) -> bool:
    return len(text) == 1 and text.upper() in letters.upper()


def _leading_option(text: str, letters: str, texts: Mapping[str, str]) -> str | None:
    """Return the option at the start of the text. Return None if there is none, or if other options follow."""
    letter = f"[{letters}{letters.lower()}]"
    leading = re.match(
        rf"[(\[]({letter})[)\]]|({letter})(?:(?=[.):\n]| [-–—] |,? (?:because|since)\b|$)"
        r"| is (?:the )?(?:correct|right|best|answer)\b)",
        text,
    )
    if leading is None:
        return None
    written = leading[leading.lastindex or 0]
    option, rest = written.upper(), " ".join(text[leading.end() :].split())
    listed, end = _listed(rest, letters if written.isupper() else letters + letters.lower(), texts)
    later = re.findall(rf"[(\[]({letter})[)\]]|(?<![\w.])({letter})[.):](?= )", rest[end:])
    others = [*listed, *({"".join(groups).upper()} for groups in later)]
    return option if all(option in names for names in others) else None


def _listed(rest: str, letters: str, texts: Mapping[str, str]) -> tuple[list[set[str]], int]:
    """Return the options in a list at the start of a text, by letter or by text, and the end of the list.

    A text that several options share names all of them. The article in "A dog" is not a letter, nor is the "I" in "I
    think".
    """
    by_length = sorted(texts.values(), key=len, reverse=True)
    full_texts = "|".join(re.escape(text) for text in by_length if text and not _is_letter(text, letters))
    item = re.compile(
        rf"(?:{JOINED}|\b(?:because|since) (?=[{letters}]\b))*?"
        rf"(?:(?P<text>(?i:{full_texts or '(?!)'}))(?!\w|[.,:/-]\w)"
        rf"|(?![AIai] (?!(?:or|and|because|since)\b)\w\w)(?P<letter>[{letters}])(?![\w'’]))"
    )
    named: list[set[str]] = []
    end = 0
    while match := item.match(rest, end):
        end = match.end()
        names = {letter for letter, text in texts.items() if text == _comparable(match["text"] or "")}
        named.append({match["letter"].upper()} if match["letter"] else names)
    return named, end
