"""Rollout-only evaluation: the run's own figures again, and every sample once for any number of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from launch import cli
from rl_vlm.config.describe import to_yaml
from rl_vlm.evaluation import evaluate_run
from rl_vlm.trainer import train
from tests.integration import tiny_run
from tests.integration.tiny_run import make_config, metric_lines

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLED = {"eval_temperature": 1.0, "num_generations_eval": 3}


def evaluation_rows(output_dir: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(output_dir / "evaluation" / "completions.parquet").to_pylist()


@pytest.mark.parametrize("settings", [{}, SAMPLED, {"use_peft": True}], ids=["greedy", "sampled", "lora"])
def test_command_gives_what_the_run_reported(settings, tiny_checkpoint, tmp_path):
    config = make_config(
        tiny_checkpoint, tmp_path / "run", eval_dataset_name=tiny_run.HELD_OUT_ROWS, max_steps=2, **settings
    )
    summary = train(config)
    assert summary["eval_after"] != summary["eval_before"]
    last_line = metric_lines(tmp_path / "run")[-1]
    assert summary["eval_after"] == {k: last_line[f"eval_{k}"] for k in summary["eval_after"]}

    (tmp_path / "run.yaml").write_text(to_yaml(config))
    arguments = ["eval", str(tmp_path / "run.yaml"), f"model_name_or_path={summary['checkpoint']}", "dataset_name=null"]
    assert cli.main([*arguments, f"output_dir={tmp_path / 'eval'}"]) == 0
    found = json.loads((tmp_path / "eval" / "evaluation" / "summary.json").read_text())
    assert found == summary["eval_after"]


def test_n_completions_of_every_sample(tiny_checkpoint, tmp_path):
    config = make_config(tiny_checkpoint, tmp_path, eval_dataset_name=tiny_run.HELD_OUT_ROWS, **SAMPLED)
    metrics = evaluate_run(config)
    rows = evaluation_rows(tmp_path)
    assert [(row["sample_id"], row["completion_index"]) for row in rows] == [
        (f"held-out-{i}", g) for i in range(5) for g in range(3)
    ]
    assert len({row["completion"] for row in rows}) > 10
    assert (metrics["num_samples"], metrics["num_completions"]) == (5, 15)
    assert metrics["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 15)
    assert {"rewards/token_sum/pass@1", "rewards/token_sum/pass@2"} <= metrics.keys()


def test_two_processes_count_every_sample_once(tiny_checkpoint, tmp_path):
    """Five samples do not split evenly: padding one rank's share would count one twice."""
    settings = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, **SAMPLED}
    alone = evaluate_run(make_config(tiny_checkpoint, tmp_path / "one", **settings))
    (tmp_path / "two.yaml").write_text(to_yaml(make_config(tiny_checkpoint, tmp_path / "two", **settings)))
    launcher = ["accelerate.commands.launch", "--config_file", "launch/accelerate/cpu.yaml", "--main_process_port", "0"]
    process = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "launch.evaluate", str(tmp_path / "two.yaml")],
        cwd=REPOSITORY, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    together = json.loads((tmp_path / "two" / "evaluation" / "summary.json").read_text())
    assert together == alone
    assert evaluation_rows(tmp_path / "two") == evaluation_rows(tmp_path / "one")
