"""Recorded runs of known outcome, each called by its name. `verdict_runs.py` says how each is known."""

import json
import shutil
from pathlib import Path

import pytest

from rl_vlm.run.verdict import Outcome, judge
from tests.helpers.run_directory import evidence_in
from tests.unit.run.verdict_runs import RECORDS, RUNS

pytestmark = pytest.mark.ci

GROUP_METRICS = (
    "reward_best_of_group", "completions/distinct_answers", "completions/num_groups", "frac_reward_faults",
    "sampling/iteration",
)  # fmt: skip
"""Metrics that older runs lack."""
NUM_GENERATIONS = 16
"""Of all runs but two, whose groups of 8 are far from all distinct."""


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_called_by_its_name(name: str):
    assert judge(evidence_in(RECORDS / name, num_generations=NUM_GENERATIONS)).outcome == RUNS[name].outcome


def test_the_records_are_of_every_kind_and_small():
    outcomes = [run.outcome for run in RUNS.values()]
    assert len(RUNS) >= 32
    assert {outcome: outcomes.count(outcome) for outcome in set(outcomes) - {"learned"}} == {
        "unchanged": 4, "worse": 2, "rewards constant": 1, "rewards faulty": 1, "too short to tell": 1, "collapsed": 7,
    }  # fmt: skip
    assert set(outcomes) == set(Outcome)
    assert sum(path.stat().st_size for path in RECORDS.rglob("*") if path.is_file()) < 2_000_000
    assert {path.name for path in RECORDS.iterdir()} == set(RUNS)


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.has_windows])
def test_an_older_run_is_judged_by_its_completions(name: str, tmp_path: Path):
    folder = shutil.copytree(RECORDS / name, tmp_path / name)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    older = [{key: value for key, value in line.items() if key not in GROUP_METRICS} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in older))
    old, new = (judge(evidence_in(path, decisive="exact_match")) for path in (folder, RECORDS / name))
    assert (old.outcome, old.step) == (new.outcome, new.step)
    assert [change.label for change in old.changes] == [change.label for change in new.changes]
    for of_texts, of_metrics in zip(old.changes, new.changes, strict=True):
        assert of_texts.before == pytest.approx(of_metrics.before, rel=1e-3)
        assert of_texts.after == pytest.approx(of_metrics.after, rel=1e-3)
