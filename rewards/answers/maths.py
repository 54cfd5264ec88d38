"""Reward for an answer that equals the solution as mathematics."""

from __future__ import annotations

import gc
import logging
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rewards.contract import Fault, Score, plain
from rewards.text import TextOrMessages, final_text, gold_text, score_golds, unboxed

LONGEST_ANSWER = 1_000
SECONDS_PER_STEP = 1
"""CPU time for parsing an answer, and for comparing it. If a step takes longer, the answer scores 0.0."""
SECONDS_PER_LOOK = 0.1
"""CPU time of all threads of the process between two looks at the time of a step."""
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off

DELIMITERS = re.compile(r"\$[^$]+\$|\\\(|\\\[")
SCIENTIFIC = re.compile(r"(?<=[0-9.])[eE]([-+]?[0-9]{1,3})(?![0-9])")
SIGNS = str.maketrans(
    {"−": "-", "–": "-", "°": r"^\circ", "²": "^2", "³": "^3", "×": r"\times ", "·": r"\cdot ", "÷": "/",
     "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
)  # fmt: skip
ROOT = re.compile(r"√(?:([0-9]+|[a-z])|\(([^()]*)\))")
MIXED = re.compile(r"^([-+]?)([0-9]{1,9}) ([0-9]{1,9})/([0-9]{1,9})$")
UNIT_POWER = re.compile(
    r"^([-+0-9.,/ ]+ ?)(?:mm|cm|dm|m|km|in|inch|ft|yd|mi|units?|square units)(?: ?\^ ?\{?[23]\}?)?$"
)
NUMBER = re.compile(r"[-+]?[0-9]{1,20}(?:\.[0-9]{1,20})?")
TOO_LARGE = re.compile(
    r"""\^ [\s{(+-]* [0-9]{5}   # an exponent of five digits or more
    | \^ [\s{(0-9+-]* \^          # a power of numbers in an exponent
    | [0-9]{5} \s* ! | ! \s* ! \s* !""",
    re.VERBOSE,
)
"""Numbers that would take long to compute."""


def maths(completions: Sequence[TextOrMessages], solution: Sequence[Any]) -> list[Score]:
    r"""Return 1.0 if math-verify finds that the answer equals `solution`, else 0.0; None if `solution` is None.

    The answer is the text after the last `</think>`, or the content of its last closed `<answer>` tag. If this contains
    a closed `\boxed{...}`, only the content of the last box counts. A solution that cannot be parsed is a fault.
    """
    golds = [_gold_text(gold) for gold in solution]
    expressions = {gold: parsed(gold) for gold in set(golds) if isinstance(gold, str)}

    def score(text: str, gold: str) -> Score:
        if not expressions[gold]:
            return Fault("type", f"`solution` is {gold[:60]!r}, which math-verify cannot parse")
        return _is_equal(parsed(text), expressions[gold])

    return score_golds(completions, golds, score)


def _gold_text(solution: Any) -> str | Fault | None:
    if isinstance(plain(solution), bool):
        return Fault("type", f"`solution` is {solution}; only text or a number can be compared")
    return gold_text(solution)


def _is_equal(answer: list[Any], gold: list[Any]) -> float:
    from math_verify import verify

    with limited():
        return float(bool(answer) and verify(gold, answer, timeout_seconds=0))
    return 0.0


def parsed(text: str) -> list[Any]:
    """Parse the answer in a text to math-verify's expressions. The list is empty if it is unreadable or too large."""
    from math_verify import LatexExtractionConfig, parse

    answer = unboxed(final_text(text)).strip("*`. \n")
    if not answer or len(answer) > LONGEST_ANSWER:
        return []
    answer = as_latex(answer)
    if TOO_LARGE.search(answer) or contradicts_itself(answer):
        return []
    latex = answer if DELIMITERS.search(answer) else rf"\boxed{{{answer}}}"
    with limited():
        return parse(latex, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=0)
    return []


def as_latex(answer: str) -> str:
    """Convert plain mathematical signs of an answer to LaTeX. Drop the power of a unit after a number."""
    answer = SCIENTIFIC.sub(r"\\cdot 10^{\1}", answer.replace("**", "^").translate(SIGNS))
    answer = ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", answer)
    answer = MIXED.sub(r"\1(\2+\3/\4)", answer)
    return UNIT_POWER.sub(r"\1", answer)


def contradicts_itself(answer: str) -> bool:
    """Return whether the two sides of an equation are different numbers, as in `8 = 7`."""
    sides = [side.strip("$ ") for side in answer.split("=")]
    return len({float(side) for side in sides if NUMBER.fullmatch(side)}) > 1


@contextmanager
def limited() -> Iterator[None]:
    """Leave the block after `SECONDS_PER_STEP` of CPU time, so that scores are the same on a busy machine.

    math-verify's own limit is in wall time. This limit counts the CPU time of the calling thread alone, without garbage
    collections, which take seconds in a large process. It uses a signal, which only the main thread can receive: other
    threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from math_verify.errors import TimeoutException

    is_inside, ends, collects = True, time.thread_time() + SECONDS_PER_STEP, gc.isenabled()

    def leave(*_: Any) -> None:
        if is_inside and time.thread_time() >= ends:
            raise TimeoutException

    before = signal.signal(signal.SIGPROF, leave)
    gc.disable()
    signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_LOOK, SECONDS_PER_LOOK)
    try:
        with suppress(TimeoutException):
            yield
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        if collects:
            gc.enable()
