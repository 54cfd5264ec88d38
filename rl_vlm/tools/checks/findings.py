"""What the doctor finds: findings with a severity, and what was checked or could not be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rl_vlm.errors import RLVLMError, Stopped

Severity = Literal["error", "warning", "info"]
"""error: the run stops, or trains on something else than is meant. warning: it runs, and its result is worse or
misleading. info: worth knowing."""
STATUS: dict[Severity, int] = {"info": 0, "warning": 1, "error": 2}
"""Exit status of the command, by the worst severity. 2 is the status of an error of the user in every command."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found. Findings of the same kind are shown together."""

    severity: Severity
    kind: str
    what: str
    remedy: str
    data: str | None = None
    """The data that the row belongs to."""
    row: int | None = None


@dataclass
class Diagnosis:
    """Everything that was found."""

    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self, kind: str, remedy: str) -> Iterator[None]:
        """Note an RLVLMError of the block as a finding, but for a stop."""
        try:
            yield
        except Stopped:
            raise
        except RLVLMError as error:
            self.findings.append(Finding("error", kind, str(error), remedy))

    @property
    def status(self) -> int:
        """Return the exit status: 0 if there is nothing but infos, 1 with warnings, 2 with errors."""
        return max((STATUS[finding.severity] for finding in self.findings), default=0)
