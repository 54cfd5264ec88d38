"""The text of a completion, and the answer in it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any, Literal, TypeVar

from rewards.contract import Fault, Score, plain

T = TypeVar("T")

TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
MOST_MARKS = 30

TextOrMessages = str | list[dict[str, Any]]

BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
"""The start of a box, an escaped character (not a brace), or a brace."""


def completion_text(completion: TextOrMessages) -> str:
    """Return the text of a plain completion, or of the last message of a conversational one."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content if block["type"] == "text")


def answer_text(text: str) -> str:
    r"""Return the final text of a completion, or the content of its last closed `\boxed{...}` if it has one.

    If the box holds only `\text{...}`, return the content of `\text`.
    """
    answer = unboxed(final_text(text))
    wrapped = TEXT.fullmatch(answer)
    return wrapped[1].strip() if wrapped else answer


def final_text(text: str) -> str:
    """Return the stripped text after the last `</think>`, or the content of its last closed `<answer>` tag."""
    text = text.rpartition("</think>")[2]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return text.strip()
    return text[start + len("<answer>") : end].strip()


def unboxed(text: str) -> str:
    r"""Return the content of the last closed `\boxed{...}`, or the whole text if there is none."""
    spans = boxed_spans(text)
    return text[slice(*max(spans))].strip() if spans else text


def composed(text: str, form: Literal["NFC", "NFKC"] = "NFC") -> str:
    """Convert a text to a normal form of Unicode. A character keeps at most 30 combining marks.

    The time to sort the marks grows with the square of their number (UAX #15, stream-safe text format).
    """
    if text.isascii():
        return text
    kept, num_marks = [], 0
    for character in text:
        num_marks = num_marks + 1 if unicodedata.combining(character) else 0
        if num_marks <= MOST_MARKS:
            kept.append(character)
    return unicodedata.normalize(form, "".join(kept))


def boxed_spans(text: str) -> list[tuple[int, int]]:
    r"""Return the start and end of the content of each closed `\boxed{...}`, nested ones included."""
    spans: list[tuple[int, int]] = []
    starts: list[int | None] = []  # one per open brace; None if it does not open a box
    for match in BRACE.finditer(text):
        if match[0] == "{":
            starts.append(None)
        elif match[0].startswith("\\boxed"):
            starts.append(match.end())
        elif match[0] == "}" and starts and (start := starts.pop()) is not None:
            spans.append((start, match.start()))
    return spans


def score_golds(
    completions: Sequence[TextOrMessages], golds: Iterable[T | Fault | None], score: Callable[[str, T], Score]
) -> list[Score]:
    """Score the text of each completion against its gold answer.

    The score is None if there is no gold answer, and a fault if the gold answer is one.
    """
    return [
        gold if gold is None or isinstance(gold, Fault) else score(completion_text(completion), gold)
        for completion, gold in zip(completions, golds, strict=True)
    ]


def gold_text(solution: Any) -> str | Fault | None:
    """Return a gold answer as text, None if there is none, or a fault if no answer can equal its type.

    NaN means no gold answer, as in tables.
    """
    gold = plain(solution)
    if gold is None:
        return None
    if not isinstance(gold, str | Number):
        return Fault("type", f"`solution` is a {type(gold).__name__}; only text, a number or a bool can be compared")
    return None if gold != gold else str(gold)
