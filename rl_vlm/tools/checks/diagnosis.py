"""A check is a generator of findings and notes. This module runs checks, and collects these."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

from rl_vlm.errors import Finding, Problem, RLVLMError, Severity, Stopped

STATUS: dict[Severity, int] = {"info": 0, "warning": 1, "error": 2}
"""Exit status of the command, by the worst severity. In every command, 2 stands for an error of the user."""

SETTING = Problem("settings", "Change the setting that the message names.")
DATA = Problem("data", "Change the data or the setting that the message names.")
MODEL = Problem("model", "Change the model, or the setting that the message names.")


class Note(NamedTuple):
    """A line about something that a check has checked, or could not check."""

    text: str
    is_checked: bool = True


T = TypeVar("T")
P = ParamSpec("P")
Checking = Generator[Finding | Note, None, T]
"""A running check. It yields findings and notes, and may return a value for later checks."""


def attempt(check: Checking[T], problem: Problem = SETTING) -> Checking[T | None]:
    """Run a check. If it raises an RLVLMError, yield a finding and return None. Raise `Stopped` again.

    An error without a kind gets the kind and the remedy of `problem`.
    """
    try:
        return (yield from check)
    except Stopped:
        raise
    except RLVLMError as error:
        yield finding_of(error, problem)
        return None


def finding_of(error: RLVLMError, problem: Problem = SETTING) -> Finding:
    """Return the finding for an error. Its kind is `problem` if the error names none."""
    kind, remedy = error.problem or problem
    return Finding("error", kind, str(error), remedy)


def calling(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> Checking[T]:
    """Make a check of a function that raises its problem."""
    return function(*arguments, **keywords)
    yield


def attempt_call(
    problem: Problem, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs
) -> Checking[T | None]:
    """Call a function that raises its problem, as `attempt` runs a check."""
    return attempt(calling(function, *arguments, **keywords), problem)


@dataclass(frozen=True)
class Diagnosis:
    """The findings of checks, and a line for each thing that was checked or not checked."""

    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def texts(self, severity: Severity) -> list[str]:
        """Return the messages of the findings of a severity."""
        return [finding.what for finding in self.findings if finding.severity == severity]

    @property
    def status(self) -> int:
        """Return the exit status: 2 if there are errors, 1 if there are warnings, else 0."""
        return max((STATUS[finding.severity] for finding in self.findings), default=0)


def collect(check: Iterable[Finding | Note]) -> Diagnosis:
    """Run a check to its end. A finding that it yields twice, as for two splits of the data, counts once."""
    found = list(check)
    notes = [each for each in found if isinstance(each, Note)]
    return Diagnosis(
        list(dict.fromkeys(each for each in found if isinstance(each, Finding))),
        [note.text for note in notes if note.is_checked],
        [note.text for note in notes if not note.is_checked],
    )
