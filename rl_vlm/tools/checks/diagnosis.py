"""Findings of the checks before a run, and the parts that they could not check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from rl_vlm.errors import Finding, RLVLMError, Severity, Stopped

STATUS: dict[Severity, int] = {"info": 0, "warning": 1, "error": 2}
"""Exit status of the command, by the worst severity. In every command, 2 stands for an error of the user."""

KIND = "settings"
REMEDY = "Change the setting that the message names."
"""Kind and remedy of a setting that cannot be used."""


class Note(NamedTuple):
    """A line about something that a check looked at, or could not look at."""

    text: str
    is_checked: bool = True


@dataclass
class Diagnosis:
    """Findings, and lines about the parts that were checked or not."""

    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self, kind: str = KIND, remedy: str = REMEDY) -> Iterator[None]:
        """Turn an RLVLMError of the block into a finding. Raise `Stopped` again."""
        try:
            yield
        except Stopped:
            raise
        except RLVLMError as error:
            self.findings.append(Finding("error", kind, str(error), remedy))

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
