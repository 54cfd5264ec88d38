"""The contract for results of reward functions, and the code that reads them.

A function is called as in TRL, by keyword with one list entry per completion, and gets the arguments it declares. It
returns a list of numbers, or a dict of such lists. Its key `reward`, or its only key, is the reward; the other keys are
sub-scores for the log. None for a completion means "does not apply". Anything else is a fault, never a silent 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import TracebackException
from typing import Any, Literal, cast

RewardFunction = Callable[..., Any]
FaultKind = Literal[
    "none", "type", "length", "nan", "inf", "magnitude", "name",
    "exception", "timeout", "crash", "load", "request", "reply", "budget", "not_applicable",
    "connection", "memory", "reset", "get_reward", "step", "action", "observation", "ids", "server",
]  # fmt: skip

LARGEST_REWARD = 1e6
ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
"""Terminal escape sequences: colours, cursor movements, titles and links."""


@dataclass(frozen=True)
class Fault:
    """The reason why a call, or one of its scores, cannot be used. For environments, why a completion has failed."""

    kind: FaultKind
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    @classmethod
    def read(cls, text: str) -> Fault:
        """Read the text of a fault."""
        kind, _, message = text.partition(": ")
        return cls(cast(FaultKind, kind), message)


Score = float | Fault | None


@dataclass
class Answer:
    """The result of one call. It has only plain Python types, so it can be sent between processes."""

    scores: list[Score]
    """One score per completion, or None if the function does not apply."""
    sub_scores: dict[str, list[Any]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns logged through `log_extra`."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Values logged through `log_metric`."""


def failed(fault: Fault, count: int) -> Answer:
    """Return the answer of a call that failed for all of its `count` completions."""
    return Answer([fault] * count)


def join(answers: Sequence[Answer]) -> Answer:
    """Join the answers of several calls. If a call did not log a column, its completions get None."""
    whole = Answer([score for answer in answers for score in answer.scores])
    for answer in answers:
        for metric, values in answer.metrics.items():
            whole.metrics.setdefault(metric, []).extend(values)
    for kind in ("sub_scores", "extras"):
        for column in dict.fromkeys(name for answer in answers for name in getattr(answer, kind)):
            parts = [getattr(answer, kind).get(column, [None] * len(answer.scores)) for answer in answers]
            getattr(whole, kind)[column] = [value for part in parts for value in part]
    return whole


def spread(answer: Answer, applies: Sequence[bool]) -> Answer:
    """Return an answer for all completions, with the values of `answer` where `applies` is True and None elsewhere."""

    def column(values: list[Any]) -> list[Any]:
        left = iter(values)
        return [next(left) if is_mine else None for is_mine in applies]

    return Answer(
        column(answer.scores),
        {name: column(values) for name, values in answer.sub_scores.items()},
        {name: column(values) for name, values in answer.extras.items()},
        answer.metrics,
    )


def read_returned(returned: Any, count: int) -> Answer:
    """Check the result of a call for `count` completions. A bad element faults its completion, all else the call."""
    lists = _named_lists(returned, count)
    if isinstance(lists, Fault):
        return failed(lists, count)
    scores = [read_score(value) for value in lists.pop("reward")]
    return Answer(scores, {name: [plain(value) for value in values] for name, values in lists.items()})


def _named_lists(returned: Any, count: int) -> dict[str, list[Any]] | Fault:
    """Return lists by name, including `reward`, with one value per completion each. Return a fault if this fails."""
    if isinstance(returned, Fault):
        return returned
    if returned is None:
        return Fault("none", "returned None, not a list; a None per completion means that it does not apply")
    named = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    if len(named) == 1:
        named = dict(zip(["reward"], named.values(), strict=True))
    if "reward" not in named:
        return Fault("type", f"returned a dict with keys {sorted(map(str, named))}, none of them `reward`")
    lists = {}
    for name, values in named.items():
        values = values.tolist() if hasattr(values, "tolist") else values  # numpy arrays and tensors
        if not isinstance(values, list | tuple):
            return Fault("type", f"returned {_shown(values)} as `{name}`, not a list of numbers")
        if len(values) != count:
            return Fault("length", f"returned {len(values)} values as `{name}` for {count} completions")
        lists[str(name)] = list(values)
    return lists


def read_score(value: Any) -> Score:
    """Read one element of a returned list as a float, None or a fault."""
    try:
        return _read_score(plain(value))
    except BaseException as error:  # an object's own methods may raise
        return Fault("type", f"returned a {type(value).__name__} that cannot be read: {type(error).__name__}")


def _read_score(value: Any) -> Score:
    if value is None or isinstance(value, Fault):
        return value
    if not isinstance(value, int | float):
        return Fault("type", f"returned {_shown(value)}, not a number")
    if value in (math.inf, -math.inf):
        return Fault("inf", f"returned {value}")
    if abs(value) > LARGEST_REWARD:
        return Fault("magnitude", f"returned {_shown(value)}; no reward may exceed {LARGEST_REWARD:g} either way")
    return Fault("nan", "returned nan") if math.isnan(value) else float(value)


def plain(value: Any) -> Any:
    """Return the Python number inside a numpy or torch scalar, or any other value unchanged."""
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


def on_one_line(text: str) -> str:
    """Remove escape sequences, control characters and line breaks from a foreign text."""
    without = ESCAPE_SEQUENCE.sub("", text)
    return " ".join("".join(letter if letter.isprintable() else " " for letter in without).split())


def text_of(error: BaseException) -> str:
    """Return the text of an exception on one line, or a note if its `__str__` raises."""
    return on_one_line(str(TracebackException.from_exception(error)))


def _shown(value: Any) -> str:
    text = on_one_line(repr(value))
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"
