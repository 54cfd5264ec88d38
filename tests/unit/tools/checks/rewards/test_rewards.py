"""`rl-vlm rewards`: ten planted faults of reward functions are found, and sound functions have none."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import cli
from tests.helpers.tiers import in_tiers

pytestmark = pytest.mark.ci

BUGS: dict[str, tuple[str, set[str]]] = {
    "constant": ("return [1.0 for _ in completions]", {"constant"}),
    "inverted": ("return [-exact(c, s) for c, s in zip(completions, solution)]", {"inverted"}),
    "substring match": (
        "return [float(str(s) in c) for c, s in zip(completions, solution)]",
        {"cheat: gold within a longer answer", "cheat: both answers", "cheat: gold 100 times"},
    ),
    "wrong column": ("return [exact(c, a) for c, a in zip(completions, kwargs['level'])]", {"constant"}),
    "crashes on empty": (
        "return [float(c.split()[0].strip('</answer>') == s) for c, s in zip(completions, solution)]",
        {"fault: exception"},
    ),
    "slow": ("import time; time.sleep(2); return [exact(c, s) for c, s in zip(completions, solution)]", {"slow"}),
    "nan for some": (
        "return [exact(c, s) if len(c) < 5000 else float('nan') for c, s in zip(completions, solution)]",
        {"fault: nan"},
    ),
    "pays for length": (
        "return [exact(c, s) + len(c) / 1000 for c, s in zip(completions, solution)]",
        {"cheat: long text"},
    ),
    "pays for any tag": (
        "return [float('<answer>' in c) for c, s in zip(completions, solution)]",
        {"cheat: empty tags", "cheat: answer of another row"},
    ),
    "not deterministic": (
        "import random; return [exact(c, s) + random.random() / 100 for c, s in zip(completions, solution)]",
        {"not deterministic"},
    ),
}
"""The body of a function, and kinds of findings that must be among those of the check."""
SOUND = "return [exact(c, s) for c, s in zip(completions, solution)]"
SOURCE = """
def exact(completion, solution):
    return float(completion.rpartition("<answer>")[2].partition("</answer>")[0].strip() == str(solution))

def f(completions, solution, **kwargs):
    {body}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {i} + 100?", "solution": str(i + 100), "level": "easy"} for i in range(12)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield tmp_path
    sys.modules.pop(str(tmp_path / "mine.py"), None)


def check(target: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict]:
    status = cli.main(["rewards", "check", target, "--data", "rows.jsonl", "--json", *more])
    return status, json.loads(capsys.readouterr().out)


def kinds(report: dict) -> set[str]:
    return {finding["kind"] for finding in report["findings"]}


@pytest.mark.parametrize("bug", in_tiers(BUGS, BUGS.keys() - {"slow"}))
def test_a_planted_fault_is_found(bug: str, capsys: pytest.CaptureFixture[str]) -> None:
    body, expected = BUGS[bug]
    Path("mine.py").write_text(SOURCE.format(body=body))
    rows = 2 if bug == "slow" else 12
    status, report = check("mine.py:f", capsys, "-n", str(rows))
    assert expected <= kinds(report)
    assert status == int(any(finding["severity"] == "error" for finding in report["findings"]))
    assert all(len(finding["rows"]) <= rows for finding in report["findings"])


@pytest.mark.parametrize(
    "target", ["mine.py:f", "exact_match", "numeric", "format_tags", "edit_similarity", "rouge_l", "repetition"]
)
def test_a_sound_function_has_no_error(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(SOURCE.format(body=SOUND))
    status, report = check(target, capsys)
    assert status == 0
    assert report["findings"] == []


OF_OTHERS = {
    "TRL, format": (
        "import re\n"
        "def f(completions, **kwargs):\n"
        r"    pattern = r'<think>.+?</think>\s*<answer>.+?</answer>'"
        "\n"
        "    return [1.0 if re.fullmatch(pattern, c, re.DOTALL) else 0.0 for c in completions]"
    ),
    "TRL, columns with defaults": (
        "def f(completions, solution=None, image_path=None):\n"
        "    return [float('<think>' in c and '><' not in c) for c in completions]"
    ),
    "EasyR1": (
        "def f(reward_inputs):\n"
        "    return [{'overall': exact(r['response'], r['ground_truth'])} for r in reward_inputs]"
    ),
    "verl": (
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return exact(solution_str, ground_truth)"
    ),
}
"""Sound functions in the styles of other systems."""


@pytest.mark.parametrize("style", OF_OTHERS)
def test_a_sound_function_of_another_system_has_no_finding(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    exact = SOURCE.partition("def f(")[0]
    Path("mine.py").write_text(exact + OF_OTHERS[style])
    status, report = check("mine.py:f", capsys)
    assert report["findings"] == []
    assert status == 0


def test_empty_tags_are_no_cheat_for_a_function_of_the_form_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(OF_OTHERS["TRL, format"].replace(".+?", ".*?"))
    assert check("mine.py:f", capsys)[1]["findings"] == []
    Path("mine.py").write_text("def f(completions, **kwargs):\n    return [float(not c) for c in completions]")
    sys.modules.pop(str(Path("mine.py").absolute()), None)
    assert "cheat: empty" in kinds(check("mine.py:f", capsys)[1])


IN_A_BOX = """
import re
def f(completions, solution):
    boxes = [re.search(r"boxed{(.*)}", c) for c in completions]
    return [float(box is not None and (TEST)) for box, s in zip(boxes, solution)]
"""


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("box[1] == s", set()),
        ("s in box[1]", {"cheat: both answers", "cheat: gold within a longer answer", "cheat: gold 100 times"}),
        ("True", {"cheat: answer of another row", "cheat: empty answer"}),
        ("box[1].split()[:1] == [s]", set()),
        ("box[1].split()[-1:] == [s]", set()),
    ],
)
def test_cheats_have_the_form_that_the_function_reads(
    test: str, expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A function may read the first of several answers or the last: one that takes any of them can be cheated."""
    Path("mine.py").write_text(IN_A_BOX.replace("TEST", test))
    found = kinds(check("mine.py:f", capsys)[1])
    assert expected <= found
    assert bool(found) is bool(expected)


@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_gold_answer_on_which_a_function_raises_is_a_finding_on_its_row(
    place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    rows[place]["solution"] = "a hundred"
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("mine.py").write_text(
        SOURCE.format(body="return [exact(c, str(int(s))) for c, s in zip(completions, solution)]")
    )
    _, report = check("mine.py:f", capsys)
    (finding,) = report["findings"]
    assert (finding["kind"], finding["severity"], finding["rows"]) == ("fault: exception", "error", [place])
    assert "every completion of 1 of 12 rows" in finding["message"] and "'a hundred'" in finding["message"]


def test_a_completion_on_which_a_function_raises_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        SOURCE.format(body="return [exact(c, s) / len(c) * len(c) for c, s in zip(completions, solution)]")
    )
    _, report = check("mine.py:f", capsys)
    assert {finding["kind"] for finding in report["findings"]} == {"fault: exception"}
    assert {finding["message"].partition(" of ")[0] for finding in report["findings"]} == {
        "it fails on the completion 'empty'"
    }


@pytest.mark.parametrize("style", ["verl", "EasyR1"])
def test_the_gold_answer_is_the_one_that_the_function_is_given(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": f"{i} + 1?", "solution": f"It is {i}, and one more.", "reward_model": {"ground_truth": str(i + 1)}}
        for i in range(12)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("mine.py").write_text(SOURCE.partition("def f(")[0] + OF_OTHERS[style])
    assert check("mine.py:f", capsys)[1]["findings"] == []


def test_a_column_that_is_needed_and_always_empty_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) | {"box": None} for line in Path("rows.jsonl").read_text().splitlines()]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("mine.py").write_text(
        "def f(completions, solution, box=None, other=None):\n"
        "    return [float(c.endswith(f'<answer>{s}</answer>')) for c, s in zip(completions, solution)]"
    )
    _, report = check("mine.py:f", capsys)
    assert [finding["message"] for finding in report["findings"]] == [
        "it names the column 'box', and no row has a value in it: is the name right?"
    ]


def test_a_gold_answer_that_its_function_cannot_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    rows[7]["solution"] = "[1, 2"
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("mine.py").write_text(
        SOURCE.format(body="return [exact(c, s) * s.isdigit() for c, s in zip(completions, solution)]")
    )
    _, report = check("mine.py:f", capsys)
    (finding,) = report["findings"]
    assert (finding["kind"], finding["rows"]) == ("low gold", [7])


def test_figures_are_those_of_the_scores(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        SOURCE.format(body="return [None if s == '100' else 1.0 * (c == '') for c, s in zip(completions, solution)]")
    )
    _, report = check("mine.py:f", capsys)
    (figures,) = report["functions"]
    assert figures["rows"] == figures["rows_that_apply"] == 12
    assert figures["not_applicable"] == pytest.approx(1 / 12)
    assert figures["groups_without_spread"] == pytest.approx(1 / 12)
    assert (figures["scores"]["min"], figures["scores"]["median"], figures["scores"]["max"]) == (0, 0, 1)
    assert len(figures["oddest"]) == 10 and figures["oddest"][0]["margin"] == -1


def test_rows_are_spread_evenly(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = check("exact_match", capsys, "-n", "4")
    assert [row["row"] for row in report["functions"][0]["oddest"]] == [0, 3, 6, 9]


def test_all_functions_of_a_run_are_checked_and_their_scales_compared(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(
        "model: {model_name_or_path: none}\n"
        "rewards: {reward_funcs: [{function: exact_match, weight: 100}, format_tags]}\n"
    )
    status, report = check("run.yaml", capsys, "data.text_only=true")
    assert status == 0
    assert [(f["function"], f["kind"]) for f in report["findings"]] == [("exact_match", "scale")]
    assert [f["function"] for f in report["functions"]] == ["exact_match", "format_tags"]


def test_functions_for_a_run_with_tools(capsys: pytest.CaptureFixture[str]) -> None:
    """One reads the first turn. Another reads environments, and is left out."""
    Path("mine.py").write_text(
        "def f(completions, solution):\n"
        "    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]\n"
        "    return [float(f'>{s}<' in text) for text, s in zip(texts, solution)]\n"
        "def g(environments): return [e.score for e in environments]\n"
    )
    tools = "rollout: {environment: 'mine.py:Game'}\n"
    text = "model: {model_name_or_path: none}\nrewards: {reward_funcs: ['mine.py:f', 'mine.py:g']}\n"
    Path("run.yaml").write_text(text + tools)
    report = check("run.yaml", capsys, "data.text_only=true")[1]
    assert [f["function"] for f in report["functions"]] == ["f"]
    assert [f["function"] for f in report["findings"] if f["kind"] == "first turn"] == ["f"]
    Path("run.yaml").write_text(text)
    assert "first turn" not in kinds(check("run.yaml", capsys, "data.text_only=true")[1])


def test_findings_about_a_function_that_is_left_out_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Its section has the name of the function, which is not the name in the settings."""
    Path("mine.py").write_text(
        "def f(completions, solution, turns):\n"
        "    return [float(s in c[0]['content']) for c, s in zip(completions, solution)]\n"
        "other = f\n"
    )
    Path("run.yaml").write_text(
        "model: {model_name_or_path: none}\nrewards: {reward_funcs: ['mine.py:other', exact_match]}\n"
        "rollout: {environment: 'mine.py:Game'}\n"
    )
    report = check("run.yaml", capsys, "data.text_only=true")[1]
    assert [f["function"] for f in report["findings"]] == ["f"]
    assert report["not_checked"] == ["f: it reads turns or environments, which made-up completions do not have"]
    assert cli.main(["rewards", "check", "run.yaml", "--data", "rows.jsonl", "data.text_only=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"not checked: {report['not_checked'][0]}"
    assert lines[lines.index("f") + 1] == "  warning: first turn"
    assert lines[-1] == "0 errors, 1 warning"


@pytest.mark.parametrize(("on_bad_row", "severity", "status"), [("raise", "error", 1), ("drop", "warning", 0)])
def test_rows_that_cannot_be_read_are_findings(
    on_bad_row: str, severity: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    rows[3]["prompt"] = rows[5]["prompt"] = ""
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found, report = check("exact_match", capsys, f"on_bad_row={on_bad_row}")
    assert found == status
    assert [(f["kind"], f["severity"], f["rows"]) for f in report["findings"]] == [
        ("empty prompt", severity, [3]), ("empty prompt", severity, [5])
    ]  # fmt: skip
    assert report["functions"][0]["rows"] == 10
    cli.main(["rewards", "check", "exact_match", "--data", "rows.jsonl", f"on_bad_row={on_bad_row}"])
    assert capsys.readouterr().out.startswith(f"{severity}: empty prompt: 2 rows of rows.jsonl\n  rows.jsonl, row 3: ")


@pytest.mark.parametrize(
    ("function", "golds", "given"),
    [
        ("temporal_iou", [[0, 4], [1, 5]], "solution_times: frames"),
        ("iou", [[0, 0, 40, 40], [1, 2, 30, 40]], "coordinates: per_mille"),
    ],
)
def test_gold_answers_of_other_units_are_not_compared(
    function: str, golds: list[list[int]], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gold answers, as completions, would score too little, and the function would look wrong."""
    Path("rows.jsonl").write_text("\n".join(json.dumps({"prompt": "?", "solution": gold}) for gold in golds))
    found, report = check(function, capsys, f"kwargs={{{given}}}")
    assert (found, {kind.partition(":")[0] for kind in kinds(report)}) == (1, {"fault"})  # rows without media
    (note,) = report["not_checked"]
    assert note.startswith(f"gold answers and cheats of {function}: its gold answers ")
    assert report["functions"][0]["rows"] == 2


def test_a_check_that_checks_nothing_says_so_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(
        "model: {model_name_or_path: none}\n"
        "rewards: {reward_funcs: [{function: judge, kwargs: {base_url: 'http://127.0.0.1:9/v1', model: m}}]}\n"
    )
    assert cli.main(["rewards", "check", "run.yaml", "--data", "rows.jsonl", "data.text_only=true"]) == 2
    printed = capsys.readouterr()
    assert "nothing was checked" in printed.err and printed.out == ""


def test_the_report_in_words_names_findings_with_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(SOURCE.format(body=BUGS["substring match"][0]))
    assert cli.main(["rewards", "check", "mine.py:f", "--data", "rows.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert (
        "warning: cheat: both answers: the completion 'both answers' gets as much as the gold answer on 12 of 12"
        in printed
    )
    assert "(rows 0, 1, 2, 3, 4, …)" in printed
    assert printed.splitlines()[-1].startswith("0 errors, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "exact_match"], "--data is needed"),
        (["check", "exact_match", "--data", "rows.jsonl", "-n", "0"], "-n must be at least 1"),
        (["check", "exact_match", "--data", "rows.jsonl", "--completions", "2"], "give its YAML file"),
        (["check", "exact_mach", "--data", "rows.jsonl"], "did you mean 'exact_match'"),
        (
            ["check", "exact_match", "--data", "rows.jsonl", "max_steps=3"],
            "train.max_steps has no effect on a check of",
        ),
        (["check", "exact_match", "--data", "rows.jsonl", "kwargs={a"], "the value of `kwargs={a` is not YAML"),
        (["check", "exact_match", "--data", "rows.jsonl", "weight="], "`weight=` has no value"),
        (["check", "exact_match", "--data", "none.jsonl"], "none.jsonl cannot be read"),
        (["show", "exact_mach"], "did you mean 'exact_match'"),
    ],
)
def test_errors_of_the_user(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rewards", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_function_alone_takes_settings(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "def f(completions, solution, *, right=1.0, **kwargs):\n"
        "    return [right * (c == f'<answer>{s}</answer>') for c, s in zip(completions, solution)]\n"
    )
    entry = ["kwargs={right: 0.5}", "name=half", "data.prompt_template='{level} {solution}?'"]
    status, report = check("mine.py:f", capsys, *entry)
    assert status == 0
    (trial,) = report["functions"]
    assert (trial["function"], trial["scores"]["max"]) == ("half", 0.5)


@pytest.mark.parametrize(("parameter", "status"), [("**kwargs", 0), ("prompts", 2)])
def test_rows_need_no_prompt_for_a_function_that_reads_none(
    parameter: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps({"solution": str(i)}) + "\n" for i in range(12)))
    Path("mine.py").write_text(SOURCE.format(body=SOUND).replace("**kwargs", parameter))
    assert cli.main(["rewards", "check", "mine.py:f", "--data", "rows.jsonl"]) == status
    assert ("found None for a prompt" in capsys.readouterr().err) == (status == 2)


def test_list_names_every_built_in_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    from rewards.registry import BUILT_INS

    assert cli.main(["rewards", "list"]) == 0
    printed = capsys.readouterr().out
    assert {line.split()[0] for line in printed.splitlines() if line.startswith("  ")} >= BUILT_INS.keys()
    assert "exact_match           Return 1.0 if the answer equals `solution`" in printed


def test_list_names_missing_packages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_vlm.reward.function.find_spec", lambda name: None)
    cli.main(["rewards", "list"])
    assert "(needs rapidfuzz: pip install -e '.[rewards]')" in capsys.readouterr().out


def test_show_prints_the_page_of_a_built_in_and_the_columns_of_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rewards", "show", "exact_match"]) == 0
    printed = capsys.readouterr().out
    assert "settings  ignore_case: false" in printed and '| `"7 or 8"` | `solution="7"` | 0.0 |' in printed
    Path("mine.py").write_text("def f(reward_inputs, scale=2.0):\n    'Mine.'\n    return []\n")
    assert cli.main(["rewards", "show", "mine.py:f"]) == 0
    printed = capsys.readouterr().out
    assert "protocol  EasyR1" in printed and "settings  scale: 2.0" in printed and printed.endswith("Mine.\n")


def test_another_column_of_a_question_makes_no_other_answer(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "Which?", "solution": "AB"[i % 2], "options": [f"cup {i}", f"dog {i}"]} for i in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, report = check("choice", capsys)
    assert (status, kinds(report)) == (0, set())
