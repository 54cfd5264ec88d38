"""Write findings and notes of checks as text, as comments on the settings of a dry run, or as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl_vlm.errors import Finding, shorten
from rl_vlm.tools.checks.diagnosis import STATUS, Diagnosis

NUM_SHOWN = 5
"""Number of rows that the text names in each group."""
LONGEST = 300
KEYS = {name: name for name in ("severity", "kind", "what", "remedy", "data", "row")}
"""Keys of a finding about a run, and their fields."""
FUNCTION_KEYS = {"function": "function", "kind": "kind", "severity": "severity", "message": "what", "rows": "rows"}
"""Keys of a finding about a reward function, and their fields."""


def report_text(diagnosis: Diagnosis) -> str:
    """Return the report as text: lines about the checks, groups of findings with errors first, and a count."""
    lines = list(note_lines(diagnosis))
    for group in grouped(diagnosis.findings):
        lines += ["", *group_lines(group)]
    return "\n".join([*lines, "", closing_line(diagnosis.findings), ""])


def comments(diagnosis: Diagnosis) -> str:
    """Return the lines about the checks, and the warnings with their remedies, as comments of a YAML file."""
    warnings = [finding for finding in diagnosis.findings if finding.severity == "warning"]
    lines = [*note_lines(diagnosis), *(f"warning: {each.what}. {each.remedy}".rstrip(". ") for each in warnings)]
    return "".join(f"# {line[0].upper()}{line[1:]}.\n" for line in lines)


def note_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield a line for each part that was checked or not."""
    yield from (f"checked: {line}" for line in diagnosis.checked)
    yield from (f"not checked: {line}" for line in diagnosis.not_checked)


def grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Group the findings by severity, kind, data and remedy, with errors first."""
    groups: dict[tuple[str, str, str | None, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: -STATUS[finding.severity]):
        groups.setdefault((finding.severity, finding.kind, finding.data, finding.remedy), []).append(finding)
    return list(groups.values())


def group_lines(group: list[Finding]) -> list[str]:
    """Return the lines of one group: the number of rows, the first findings, and the remedy.

    A finding whose message names the remedy takes one line.
    """
    first = group[0]
    if not first.remedy:
        return [f"{each.severity}: {each.kind}: {each.what}{example_rows(each)}." for each in group]
    number = f": {len(group)} row{'s' * (len(group) != 1)} of {first.data}" if first.row is not None else ""
    lines = [f"{first.severity}: {first.kind}{number}"]
    for finding in group[:NUM_SHOWN]:
        lines += [f"  {line}" for line in shorten(finding.what, LONGEST).splitlines()]
    if len(group) > NUM_SHOWN:
        lines.append(f"  and {len(group) - NUM_SHOWN} more, which --json lists")
    return [*lines, f"  remedy: {first.remedy}"]


def example_rows(finding: Finding) -> str:
    """Return the first example rows of a finding in parentheses, or an empty string."""
    more = ", …" if len(finding.rows) > NUM_SHOWN else ""
    return f" (rows {', '.join(map(str, finding.rows[:NUM_SHOWN]))}{more})" if finding.rows else ""


def closing_line(findings: Iterable[Finding]) -> str:
    """Return the number of findings of each severity, as text."""
    severities = [finding.severity for finding in findings]
    counts = {name: severities.count(name) for name in reversed(STATUS)}
    shown = [f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count or name != "info"]
    return ", ".join(shown) if severities else "nothing found"


def finding_data(findings: Iterable[Finding], keys: Mapping[str, str] = KEYS) -> list[dict[str, Any]]:
    """Return the findings as plain values. `keys` maps each key to a field of `Finding`."""
    return [{key: getattr(finding, field) for key, field in keys.items()} for finding in findings]


def report_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return all findings and the lines about the checks as plain values."""
    lines = {"checked": diagnosis.checked, "not_checked": diagnosis.not_checked}
    return {"status": diagnosis.status, **lines, "findings": finding_data(diagnosis.findings)}
