"""Findings and notes as text, as comments and as plain values, for all commands."""

from rl_vlm.errors import Finding
from rl_vlm.tools.checks.diagnosis import Diagnosis, Note, collect
from rl_vlm.tools.checks.text import FUNCTION_KEYS, closing_line, comments, finding_data, group_lines, report_data

LOW = Finding("warning", "low gold", "it is low", function="f", rows=tuple(range(7)))
FULL = Finding("error", "disk space", "full", "Free space.")


def test_a_finding_without_a_remedy_takes_one_line():
    assert group_lines([LOW]) == ["warning: low gold: it is low (rows 0, 1, 2, 3, 4, …)."]
    assert group_lines([FULL]) == ["error: disk space", "  full", "  remedy: Free space."]


def test_the_closing_line_counts_errors_and_warnings():
    assert closing_line([]) == "nothing found"
    assert closing_line([LOW, LOW]) == "0 errors, 2 warnings"
    assert closing_line([FULL, Finding("info", "k", "w")]) == "1 error, 0 warnings, 1 info"


def test_notes_and_warnings_are_comments_of_a_dry_run():
    hot = Finding("warning", "sampling temperature", "it is 9", "Set it to about 1.")
    found = collect([Note("the data"), LOW, hot, Note("the model", is_checked=False), FULL])
    lines = [
        "Checked: the data.",
        "Not checked: the model.",
        "Warning: it is low.",
        "Warning: it is 9. Set it to about 1.",
    ]
    assert comments(found) == "".join(f"# {line}\n" for line in lines)


def test_one_row_is_not_called_rows():
    row = Finding("warning", "duplicate", "d, row 3: row 1", "Leave it out.", "d", 3)
    assert group_lines([row])[0] == "warning: duplicate: 1 row of d"
    assert group_lines([row, row])[0] == "warning: duplicate: 2 rows of d"


def test_plain_values_have_the_keys_of_their_command():
    (finding,) = report_data(Diagnosis([FULL]))["findings"]
    assert finding == {
        "severity": "error", "kind": "disk space", "what": "full", "remedy": "Free space.", "data": None, "row": None
    }  # fmt: skip
    (finding,) = finding_data([LOW], FUNCTION_KEYS)
    expected = {"function": "f", "kind": "low gold", "severity": "warning", "message": "it is low", "rows": LOW.rows}
    assert finding == expected


def test_a_finding_that_two_splits_share_counts_once():
    same = Finding("error", "columns of rewards", "no column 'gold'")
    assert collect([same, LOW, same]).findings == [same, LOW]
