"""The table of checks: which checks a command runs, and what becomes of what they yield, return and raise."""

from inspect import signature
from pathlib import Path
from pkgutil import resolve_name

import pytest

from rl_vlm.errors import ConfigError, Finding, Stopped
from rl_vlm.tools.checks import table
from rl_vlm.tools.checks.diagnosis import Checking, Note, attempt, calling, collect
from rl_vlm.tools.checks.table import CHECKS, Check, Cost, Kind, Subject
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


SECONDS = ["needed_settings", "batches", "sampling_temperature", "rewards", "toolbox", "token_loss"]
AROUND = ["output_directory", "packages", "model_files"]
ROWS = ["machine", "every_row", "duplicates", "prompts", "golds", "resets", "size"]


@pytest.mark.parametrize(
    ("kind", "cost", "names"),
    [
        ("train", Cost.SECONDS, [*SECONDS, "first_rows", *AROUND]),
        ("train", Cost.ROWS, [*SECONDS, *AROUND, *ROWS]),
        ("train", Cost.MODEL, [*SECONDS, *AROUND, *ROWS, "loaded_model", "two_steps"]),
        ("eval", Cost.SECONDS, ["needed_settings", "rewards", "toolbox", "first_rows", "evaluation_options", *AROUND]),
        ("serve", Cost.SECONDS, ["packages", "model_files"]),
    ],
)
def test_a_command_selects_checks_by_cost_and_kind_of_run(
    kind: Kind, cost: Cost, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert names_run(Subject(make_config("m", tmp_path), kind, cost), monkeypatch) == names


def test_every_check_of_the_table_is_a_function_of_a_subject():
    for check in CHECKS:
        function = resolve_name(f"rl_vlm.tools.checks.{check.function}")
        assert list(signature(function).parameters) == ["subject"], check


def test_an_error_is_a_finding_and_values_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = ("giving", "refusing", "taking")
    monkeypatch.setattr(table, "CHECKS", [Check(name, problem=("kind", "Mend it.")) for name in names])
    monkeypatch.setattr(table, "resolve_name", lambda name: globals()[name.rpartition(".")[2]])
    found = collect(Subject(make_config("m", tmp_path)).run_checks())
    assert found.findings == [Finding("info", "k", "w"), Finding("error", "kind", "no", "Mend it.")]
    assert (found.checked, found.not_checked) == (["a part", "7 and None"], ["the rest"])
    deeper = collect(Subject(make_config("m", tmp_path), cost=Cost.ROWS).run_checks())
    assert deeper.not_checked == []  # checks of a higher cost say so themselves


def test_a_stop_is_no_finding():
    def stopped() -> Checking[None]:
        yield Note("a part")
        raise Stopped(15)

    with pytest.raises(Stopped):
        list(attempt(stopped()))
