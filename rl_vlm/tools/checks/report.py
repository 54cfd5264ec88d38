"""Write the report of the doctor: a text with the findings grouped by kind, and a JSON file with all findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_vlm.errors import Finding, shorten
from rl_vlm.log.files import output
from rl_vlm.tools.checks.diagnosis import STATUS, Diagnosis

NUM_SHOWN = 5
"""Number of rows that the text names in each group."""
LONGEST = 300


def report_text(diagnosis: Diagnosis) -> str:
    """Return the report as text: lines about the checks, groups of findings with errors first, and a count."""
    lines = [f"checked: {line}" for line in diagnosis.checked]
    lines += [f"not checked: {line}" for line in diagnosis.not_checked]
    for group in grouped(diagnosis.findings):
        lines += ["", *group_lines(group)]
    return "\n".join([*lines, "", closing_line(diagnosis), ""])


def grouped(findings: list[Finding]) -> list[list[Finding]]:
    """Group the findings by severity, kind, data and remedy, with errors first."""
    groups: dict[tuple[str, str, str | None, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: -STATUS[finding.severity]):
        groups.setdefault((finding.severity, finding.kind, finding.data, finding.remedy), []).append(finding)
    return list(groups.values())


def group_lines(group: list[Finding]) -> list[str]:
    """Return the lines of one group: the number of rows, the first findings, and the remedy."""
    first = group[0]
    number = f": {len(group)} rows of {first.data}" if first.row is not None else ""
    lines = [f"{first.severity}: {first.kind}{number}"]
    for finding in group[:NUM_SHOWN]:
        lines += [f"  {line}" for line in shorten(finding.what, LONGEST).splitlines()]
    if len(group) > NUM_SHOWN:
        lines.append(f"  and {len(group) - NUM_SHOWN} more, which --json FILE lists")
    return [*lines, f"  remedy: {first.remedy}"]


def closing_line(diagnosis: Diagnosis) -> str:
    """Return the number of findings of each severity, as text."""
    counts = {name: sum(finding.severity == name for finding in diagnosis.findings) for name in reversed(STATUS)}
    found = ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
    return found or "nothing found"


def write_json(diagnosis: Diagnosis, path: Path) -> None:
    """Write all findings and the lines about the checks as JSON. Raises ConfigError if the file cannot be written."""
    content: dict[str, Any] = {
        "status": diagnosis.status,
        "checked": diagnosis.checked,
        "not_checked": diagnosis.not_checked,
        "findings": [
            {name: getattr(finding, name) for name in ("severity", "kind", "what", "remedy", "data", "row")}
            for finding in diagnosis.findings
        ],
    }
    with output(path, "--json") as file:
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
