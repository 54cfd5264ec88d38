"""What the checks before a run have found, and what they could not check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rl_vlm.errors import Finding, RLVLMError, Severity, Stopped

STATUS: dict[Severity, int] = {"info": 0, "warning": 1, "error": 2}
"""Exit status of the command, by the worst severity. 2 is the status of an error of the user in every command."""


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

    def texts(self, severity: Severity) -> list[str]:
        """Return what the findings of a severity say."""
        return [finding.what for finding in self.findings if finding.severity == severity]

    @property
    def status(self) -> int:
        """Return the exit status: 0 if there is nothing but infos, 1 with warnings, 2 with errors."""
        return max((STATUS[finding.severity] for finding in self.findings), default=0)
