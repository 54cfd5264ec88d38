"""The table of checks: which checks a command runs, and what becomes of what they yield, return and raise."""

from inspect import signature
from pathlib import Path
from pkgutil import resolve_name

import pytest

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.problems import UNFILLED_TEMPLATE
from rl_vlm.errors import ConfigError, DataError, Finding, Problem, Stopped
from rl_vlm.tools.checks import table
from rl_vlm.tools.checks.diagnosis import DATA, Checking, Note, attempt, attempt_call, calling, collect
from rl_vlm.tools.checks.rows import read_split
from rl_vlm.tools.checks.table import CHECKS, Check, CheckCost, Purpose, Subject
from tests.helpers.tiny_run import make_config


def refusing(subject: Subject) -> Checking[int]:
    yield Note("a part")
    raise ConfigError("no")


def giving(subject: Subject) -> Checking[int]:
    yield Finding("info", "k", "w")
    return 7


def taking(subject: Subject) -> Checking[None]:
    yield Note(f"{subject.value(giving)} and {subject.value(refusing)}")
    yield from subject.left_out("the rest")


def names_run(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the checks that run for a subject, in order."""
    names: list[str] = []

    def note(name: str):
        return lambda subject: calling(names.append, name.rpartition(":")[2])

    monkeypatch.setattr(table, "resolve_name", note)
    collect(subject.run_checks())
    return names


SECONDS = ["needed_settings", "batches", "sharding", "sampling_temperature", "rewards", "toolbox", "token_loss"]
OF_EVALUATION = ["needed_settings", "sharding", "rewards", "toolbox"]
AROUND = ["output_directory", "packages", "model_files"]
ROWS = ["machine", "every_row", "duplicates", "prompts", "golds", "resets", "size"]


@pytest.mark.parametrize(
    ("kind", "cost", "names"),
    [
        ("train", CheckCost.SECONDS, [*SECONDS, "first_rows", *AROUND]),
        ("train", CheckCost.ROWS, [*SECONDS, *AROUND, *ROWS]),
        ("train", CheckCost.MODEL, [*SECONDS, *AROUND, *ROWS, "loaded_model", "two_steps"]),
        ("ranks", CheckCost.ROWS, ["compared", "sharding", "steps_on_ranks"]),
        ("eval", CheckCost.SECONDS, [*OF_EVALUATION, "first_rows", "evaluation_options", *AROUND]),
        ("serve", CheckCost.SECONDS, ["packages", "model_files"]),
    ],
)
def test_a_command_selects_checks_by_cost_and_kind_of_run(
    kind: Purpose, cost: CheckCost, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert names_run(Subject(make_config("m", tmp_path), kind, cost), monkeypatch) == names


def test_every_check_of_the_table_is_a_function_of_a_subject():
    for check in CHECKS:
        function = resolve_name(f"rl_vlm.tools.checks.{check.function}")
        assert list(signature(function).parameters) == ["subject"], check


def test_an_error_is_a_finding_and_values_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = ("giving", "refusing", "taking")
    monkeypatch.setattr(table, "CHECKS", [Check(name, problem=Problem("kind", "Mend it.")) for name in names])
    monkeypatch.setattr(table, "resolve_name", lambda name: globals()[name.rpartition(".")[2]])
    found = collect(Subject(make_config("m", tmp_path)).run_checks())
    assert found.findings == [Finding("info", "k", "w"), Finding("error", "kind", "no", "Mend it.")]
    assert (found.checked, found.not_checked) == (["a part", "7 and None"], ["the rest"])
    deeper = collect(Subject(make_config("m", tmp_path), cost=CheckCost.ROWS).run_checks())
    assert deeper.not_checked == []  # checks of a higher cost say so themselves


@pytest.mark.parametrize("template", ["{nothing}", "{question}"])
def test_the_kind_of_a_finding_is_that_of_its_error(template: str, tmp_path: Path):
    """The first is found in the columns, and the second in the row."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": null, "solution": "7"}')
    config = DataConfig(dataset_name=str(path), prompt_template=template, text_only=True)
    (finding,) = collect(attempt(read_split(config, "train", []), DATA)).findings
    assert (finding.kind, finding.remedy) == UNFILLED_TEMPLATE


def test_an_error_without_a_kind_gets_the_kind_of_its_check():
    def refuse(what: str) -> None:
        raise DataError(what)

    (finding,) = collect(attempt_call(DATA, refuse, "no rows")).findings
    assert finding == Finding("error", "data", "no rows", DATA.remedy)


def test_a_stop_is_no_finding():
    def stopped() -> Checking[None]:
        yield Note("a part")
        raise Stopped(15)

    with pytest.raises(Stopped):
        list(attempt(stopped()))
