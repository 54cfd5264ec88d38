from typing import Any

from rl_vlm.log.outcome import comparison_outcome, evaluation_outcome, interrupted_training
from tests.helpers.checkpoints import write_checkpoint


def summary(mean: float, **more: Any) -> dict[str, Any]:
    return {
        "num_samples": 5.0,
        "rewards/exact/mean": mean,
        "rewards/exact/ci_low": mean - 0.1,
        "rewards/exact/ci_high": mean + 0.2,
        **more,
    }


def test_one_model():
    figures = {"rewards/exact/pass@1": 0.5, "rewards/exact/pass@4": 0.75, "rewards/exact/majority@4": 0.25}
    assert evaluation_outcome(summary(0.5, **figures), "runs/a") == (
        "5 samples: exact 0.5000 (95% interval 0.400 to 0.700), pass@4 0.7500, majority@4 0.2500. "
        "Every completion is in runs/a/evaluation/completions.parquet."
    )


def test_faults_tables_and_what_is_kept():
    more = {
        "reward_faults/judge/timeout": 3.0,
        "by": {"source": {"charts": summary(1.0), "scans": {"num_samples": 1.0}}},
        "kept": {"low": 0.1, "high": 0.9, "function": "exact", "num_samples": 2},
    }
    assert evaluation_outcome(summary(0.5, **more), "runs/a").splitlines()[1:] == [
        "Completions without a score because a reward function failed: judge/timeout 3.",
        "",
        "source  samples  exact",
        "charts  5        1.0000 ± 0.150",
        "scans   1        -",
        "2 samples have a success rate of 0.1 to 0.9 by exact: train on them with "
        "data.dataset_name=runs/a/evaluation/kept.parquet",
    ]


def test_nothing_scored_and_nothing_kept():
    found = {"num_samples": 1.0, "kept": {"low": 0.1, "high": 0.9, "function": "exact", "num_samples": 0}}
    lines = evaluation_outcome(found, "runs/a").splitlines()
    assert lines[0].startswith("1 samples: no completion has a score. ")
    assert lines[1] == "No sample has a success rate of 0.1 to 0.9 by exact: nothing is kept."


def test_several_checkpoints_are_rows_of_a_table():
    faulted = summary(0.5, **{"reward_faults/exact/nan": 1.0})
    assert comparison_outcome({"checkpoint-2": summary(0.25), "b": faulted}, "runs/a").splitlines() == [
        "",
        "checkpoint    samples  exact",
        "checkpoint-2  5        0.2500 ± 0.150",
        "b             5        0.5000 ± 0.150",
        "b: Completions without a score because a reward function failed: exact/nan 1.",
        "Both tables are in runs/a/evaluation/comparison.json, completions are in a folder per checkpoint beside it.",
    ]


def test_differences_from_the_first_checkpoint_are_a_second_table():
    def changed(name: str, before: float, after: float, low: float, high: float, num: int) -> dict[str, Any]:
        return {"name": name, "before": before, "after": after, "low": low, "high": high, "num": num}

    later = [changed("reward", 0.25, 0.5625, 0.125, 0.4999, 16), changed("exact", 0.5, 0.375, -0.3, 0.05, 16)]
    summaries = {
        "base": summary(0.25),
        "checkpoint-8": summary(0.5, differences=later),
        "last": summary(0.5, differences=[changed("reward", 0.25, 0.5, 0.25, 0.25, 7)]),
    }
    assert comparison_outcome(summaries, "runs/a").splitlines()[5:10] == [
        "",
        "compared with base  score   difference  95% interval        rows",
        "checkpoint-8        reward  +0.3125     +0.1250 to +0.4999  16",
        "checkpoint-8        exact   -0.1250     -0.3000 to +0.0500  16",
        "last                reward  +0.2500     too few values (7)  7",
    ]


def test_an_interrupted_run_names_its_newest_checkpoint(tmp_path):
    assert interrupted_training(str(tmp_path)) == f"Interrupted. There is no checkpoint in {tmp_path} to resume from."
    for step in (8, 10):
        write_checkpoint(tmp_path, step, lambda directory: None)
    (tmp_path / "unfinished-checkpoint-12").mkdir()
    assert interrupted_training(str(tmp_path)) == (
        f"Interrupted. The newest checkpoint is {tmp_path}/checkpoint-10.\n"
        "To continue from there, repeat the command with resume_from_checkpoint=auto"
    )
