"""`configs/look_closer.yaml` looks at a cell, and answers after it has seen the crop."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from launch import cli

pytestmark = pytest.mark.slow


def run(output_dir: Path, *overrides: str) -> list[dict]:
    """Run two steps, and return the lines of the metrics."""
    settings = [f"output_dir={output_dir}", "max_steps=2", "eval_steps=0", "save_steps=0", "prompts_per_step=8"]
    settings += ["eval_dataset_name=null", "disable_tqdm=true", "report=false", *overrides]
    assert cli.run("train", ["configs/look_closer.yaml", *settings]) == 0
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def completions(output_dir: Path) -> list[dict]:
    return pyarrow.parquet.read_table(next((output_dir / "completions").glob("completions_*.parquet"))).to_pylist()


def test_a_run_starts_from_well_formed_trajectories(tmp_path: Path):
    steps = run(tmp_path)
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["compute/shared_forwards"] > 0 and "compute/dense_forwards" not in line for line in steps)
    rows = completions(tmp_path)
    assert len(rows) == 128
    assert all(row["fault"] is None for row in rows)
    answers = [row for row in rows if row["completion"].startswith("<answer>") and row["finish_reason"] == "stop"]
    assert len(answers) > 0.85 * len(rows)
    # a call has 3 tokens, an answer 4 with its end
    assert sum(row["completion_length"] == 7 for row in answers) > 0.85 * len(rows)


def test_the_control_answers_without_a_call(tmp_path: Path):
    settings = ["environment=null", "max_turns=10", "reward_funcs=[exact_match]"]
    run(tmp_path, "model_name_or_path=examples/look_closer/model.py:answering_model", *settings)
    rows = completions(tmp_path)
    assert sum(row["completion_length"] == 4 for row in rows) > 0.9 * len(rows)
