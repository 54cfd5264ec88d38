"""Reward for an answer that equals the solution as mathematics."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from rewards.contract import Fault, Score, plain
from rewards.text import Completion, answer_text, boxed_spans, completion_text, gold_text

LONGEST_ANSWER = 1_000
SECONDS_PER_STEP = 1
"""Time for parsing an answer, and for comparing it; what takes longer scores 0.0."""

DELIMITERS = re.compile(r"\$[^$]+\$|\\\(|\\\[")
SCIENTIFIC = re.compile(r"(?<=[0-9.])[eE]([-+]?[0-9]{1,3})(?![0-9])")
TOO_LARGE = re.compile(
    r"""\^ [\s{(+-]* [0-9]{5}   # an exponent of five digits or more
    | \^ [\s{(0-9+-]* \^          # a power of numbers in an exponent
    | [0-9]{5} \s* ! | ! \s* ! \s* !""",
    re.VERBOSE,
)
"""Numbers that would take long to compute."""


def maths(completions: Sequence[Completion], solution: Sequence[Any]) -> list[Score]:
    r"""Return 1.0 if math-verify finds that the answer equals `solution`, else 0.0; None if `solution` is None.

    The answer is the content of the last closed `<answer>` tag, or what follows the last `</think>`; if that has closed
    boxes, the content of the last `\boxed{...}`. A solution that cannot be parsed is a fault.
    """
    golds = [_gold_text(gold) for gold in solution]
    expressions = {gold: parsed(gold) for gold in set(golds) if isinstance(gold, str)}

    def scored(text: str, gold: str | Fault | None) -> Score:
        if not isinstance(gold, str):
            return gold
        if not expressions[gold]:
            return Fault("type", f"`solution` is {gold[:60]!r}, which math-verify cannot parse")
        return _is_equal(parsed(text), expressions[gold])

    return [scored(completion_text(c), gold) for c, gold in zip(completions, golds, strict=True)]


def _gold_text(solution: Any) -> str | Fault | None:
    if isinstance(plain(solution), bool):
        return Fault("type", f"`solution` is {solution}; only text or a number can be compared")
    return gold_text(solution)


def _is_equal(answer: list[Any], gold: list[Any]) -> float:
    from math_verify import verify

    return float(bool(answer) and verify(gold, answer, timeout_seconds=_seconds()))


def parsed(text: str) -> list[Any]:
    """Return the answer in a text as math-verify's expressions; none if it cannot be parsed, or is too large."""
    from math_verify import LatexExtractionConfig, parse

    answer = SCIENTIFIC.sub(r"\\cdot 10^{\1}", answer_of(text).replace("**", "^"))
    if not answer or len(answer) > LONGEST_ANSWER or TOO_LARGE.search(answer):
        return []
    latex = answer if DELIMITERS.search(answer) else rf"\boxed{{{answer}}}"
    return parse(latex, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=_seconds())


def answer_of(text: str) -> str:
    """Return what is parsed of a text."""
    answer = answer_text(text).rpartition("</think>")[2]
    spans = boxed_spans(answer)
    return (answer[slice(*max(spans))] if spans else answer).strip("*`. \n")


def _seconds() -> int:
    """Return math-verify's time limit, or 0 for none: it uses signals, which only the main thread can."""
    return SECONDS_PER_STEP if threading.current_thread() is threading.main_thread() else 0
