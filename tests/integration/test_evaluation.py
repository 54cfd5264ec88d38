"""Rollout-only evaluation: the run's own figures again, and every sample once for any number of processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch

from launch import cli
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import DataConfig
from rl_vlm.data.samples import load_rows
from rl_vlm.errors import ConfigError, ModelError, RolloutError
from rl_vlm.evaluation.options import EvaluationOptions
from rl_vlm.log.starts import read_starts
from rl_vlm.passes.proof import AGAIN, OTHER_IMAGES, OTHER_PROMPTS, OWN_FORWARD, ROLLOUTS, SIBLINGS
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.run.run import train
from rl_vlm.tools.report.build import build_page
from rl_vlm.tools.report.read import read_runs
from tests.helpers import tiny_run
from tests.helpers.evaluating import evaluate_run
from tests.helpers.tiny_run import make_config, metric_lines

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLED = {"eval_temperature": 1.0, "num_generations_eval": 3}
ONE_PROMPT_AT_ONCE = {**SAMPLED, "max_num_seqs": 3}


def has_low_bytes(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that some completions of most prompts get."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def slow(completion_ids: list[list[int]], **_: Any) -> list[float]:
    time.sleep(0.2)
    return tiny_run.token_sum(completion_ids)


def fails_on_one_row(completion_ids: list[list[int]], id: list[str], **_: Any) -> list[float]:
    if "held-out-2" in id:
        raise KeyError("no gold answer")
    return [1.0] * len(completion_ids)


def evaluation_rows(output_dir: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(output_dir / "evaluation" / "completions.parquet").to_pylist()


def test_the_model_is_proven(tiny_checkpoint, tmp_path, monkeypatch):
    given = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, **SAMPLED}
    evaluate_run(make_config(tiny_checkpoint, tmp_path / "right", **given))
    (start,) = read_starts(tmp_path / "right" / "evaluation")
    results = {each["check"].partition(" differ")[0]: each["result"] for each in start["proof"]["checks"]}
    assert results == {
        AGAIN: "holds",
        OWN_FORWARD: "holds",
        SIBLINGS: "holds",
        OTHER_IMAGES: "holds",
        f"{OTHER_PROMPTS} were not checked: there is one prompt": "untried",
        ROLLOUTS: "holds",
    }
    evaluate_run(make_config(tiny_checkpoint, tmp_path / "off", verify="off", **given))
    assert read_starts(tmp_path / "off" / "evaluation")[0]["proof"] == {}
    run_model = HFEngine.run_model

    def shifted(engine, *args):
        cache, logits = run_model(engine, *args)
        return cache, logits + torch.linspace(0, 2, logits.shape[-1])

    monkeypatch.setattr(HFEngine, "run_model", shifted)
    with pytest.raises(ModelError, match="Rollouts and dense rows differ on this CPU in log-probs by"):
        evaluate_run(make_config(tiny_checkpoint, tmp_path / "wrong", **given))
    (start,) = read_starts(tmp_path / "wrong" / "evaluation")
    assert [each["result"] for each in start["proof"]["checks"]][-1] == "failed"


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
    assert not (tmp_path / "eval" / "evaluation" / "unfinished").exists()


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
    assert {f"rewards/token_sum/{figure}@2" for figure in ("pass", "majority")} <= metrics.keys()
    assert [row["data/solution"] for row in rows] == [str(i) for i in range(5) for _ in range(3)]
    images = [tmp_path / "evaluation" / row["images"][0] for row in rows]
    assert len(set(images)) == 5 and all(path.is_file() for path in images)


def test_the_bars_of_libraries_are_hidden(tiny_checkpoint, tmp_path, capsys):
    datasets.enable_progress_bars()
    config = make_config(tiny_checkpoint, tmp_path, eval_dataset_name=tiny_run.HELD_OUT_ROWS, verify="off")
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert cli.main(["eval", str(tmp_path / "run.yaml"), "--keep", "0..1"]) == 0
    lines = [line.split(", completions/s")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        f"evaluating {tiny_checkpoint} on tests.helpers.tiny_run:held_out_rows, into {tmp_path}; importing torch and "
        "transformers first",
        "5 held-out rows", f"loading the model {tiny_checkpoint} (float32, cpu)", "evaluation: prompt 5/5",
    ]  # fmt: skip


def test_two_processes_count_every_sample_once(tiny_checkpoint, tmp_path):
    """Five samples do not split evenly: padding one rank's share would count one twice."""
    settings = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, **ONE_PROMPT_AT_ONCE}
    alone = evaluate_run(make_config(tiny_checkpoint, tmp_path / "one", **settings))
    (tmp_path / "two.yaml").write_text(to_yaml(make_config(tiny_checkpoint, tmp_path / "two", **settings)))
    evaluate_in_two_processes(tmp_path / "two.yaml")
    together = json.loads((tmp_path / "two" / "evaluation" / "summary.json").read_text())
    assert together == alone
    assert evaluation_rows(tmp_path / "two") == evaluation_rows(tmp_path / "one")


@pytest.mark.slow
def test_two_processes_leave_out_the_same_rows(tiny_checkpoint, tmp_path):
    """Each checks half of the rows; the last of twelve cannot be used, nor the fourth."""
    settings = {"eval_dataset_name": f"{__name__}:rows_with_faults", "on_bad_row": "drop", **ONE_PROMPT_AT_ONCE}
    alone = evaluate_run(make_config(tiny_checkpoint, tmp_path / "one", **settings))
    assert (alone["num_samples"], alone["num_dropped"]) == (10, 2)
    (tmp_path / "two.yaml").write_text(to_yaml(make_config(tiny_checkpoint, tmp_path / "two", **settings)))
    evaluate_in_two_processes(tmp_path / "two.yaml")
    assert evaluation_rows(tmp_path / "two") == evaluation_rows(tmp_path / "one")
    lists = [(tmp_path / name / "evaluation" / "dropped_prompts.jsonl").read_text() for name in ("one", "two")]
    assert lists[0] == lists[1]


def rows_with_faults() -> list[dict[str, Any]]:
    return [row | {"prompt": ""} if i in (3, 11) else row for i, row in enumerate(tiny_run.rows())]


def evaluate_in_two_processes(config: Path) -> None:
    launcher = ["accelerate.commands.launch", "--config_file", "launch/accelerate/cpu.yaml", "--main_process_port", "0"]
    process = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "launch.evaluate", str(config)],
        cwd=REPOSITORY, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr


def stop_after(num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets an evaluation fail before it generates its next chunk; returns the ids of prompts, as they are sampled."""
    generate, sampled = HFEngine.generate, []

    def generate_or_fail(self, requests, sampling):
        if len(sampled) == num_chunks:
            raise RolloutError("lost")
        sampled.extend(request.prompt.sample.sample_id for request in requests)
        return generate(self, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", generate_or_fail)
    return sampled


def test_an_evaluation_that_was_cut_short_repeats_no_prompt(tiny_checkpoint, tmp_path, monkeypatch):
    settings = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, **ONE_PROMPT_AT_ONCE}
    straight = make_config(tiny_checkpoint, tmp_path / "straight", **settings)
    cut = make_config(tiny_checkpoint, tmp_path / "cut", **settings)
    expected = evaluate_run(straight)
    with monkeypatch.context() as patch:
        before = stop_after(2, patch)
        with pytest.raises(RolloutError, match="lost"):
            evaluate_run(cut)
    assert not (tmp_path / "cut" / "evaluation" / "completions.parquet").exists()
    with monkeypatch.context() as patch:
        after = stop_after(99, patch)
        assert evaluate_run(cut) == expected
    assert (before, after) == (["held-out-0", "held-out-1"], ["held-out-2", "held-out-3", "held-out-4"])
    assert parquet_bytes(tmp_path / "cut") == parquet_bytes(tmp_path / "straight")


def test_completions_of_other_settings_are_not_taken_over(tiny_checkpoint, tmp_path, monkeypatch, caplog):
    settings = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, **ONE_PROMPT_AT_ONCE}
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(RolloutError, match="lost"):
            evaluate_run(make_config(tiny_checkpoint, tmp_path, **settings))
    after = stop_after(99, monkeypatch)
    evaluate_run(make_config(tiny_checkpoint, tmp_path, **settings, seed=1))
    assert len(after) == 5
    assert "is of another sampling: starting over" in caplog.text


def parquet_bytes(output_dir: Path) -> bytes:
    return (output_dir / "evaluation" / "completions.parquet").read_bytes()


@pytest.mark.slow
def test_killed_five_times_it_ends_with_the_same_parquet(tiny_checkpoint, tmp_path):
    settings = {**ONE_PROMPT_AT_ONCE, "eval_dataset_name": tiny_run.ROWS, "reward_funcs": [f"{__name__}:slow"]}
    evaluate_run(make_config(tiny_checkpoint, tmp_path / "straight", **settings))
    (tmp_path / "killed.yaml").write_text(to_yaml(make_config(tiny_checkpoint, tmp_path / "killed", **settings)))
    unfinished, moments = tmp_path / "killed" / "evaluation" / "unfinished", random.Random(0)

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "launch.evaluate", str(tmp_path / "killed.yaml")]
        return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"})

    num_finished = 0
    for kill in range(5):
        process = start()
        while kill and len(list(unfinished.glob("row_*.json"))) < num_finished + moments.randint(1, 2):
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        process.wait()
        found = len(list(unfinished.glob("row_*.json")))
        assert num_finished <= found < tiny_run.NUM_ROWS
        num_finished = found
    assert num_finished >= 4
    assert start().wait() == 0
    assert parquet_bytes(tmp_path / "killed") == parquet_bytes(tmp_path / "straight")


def test_a_reward_that_fails_on_a_row_leaves_the_rest(tiny_checkpoint, tmp_path, capsys):
    functions = [tiny_run.TOKEN_SUM, f"{__name__}:fails_on_one_row"]
    settings = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, "reward_funcs": functions, **ONE_PROMPT_AT_ONCE}
    (tmp_path / "run.yaml").write_text(to_yaml(make_config(tiny_checkpoint, tmp_path, **settings)))
    assert cli.main(["eval", str(tmp_path / "run.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "fails_on_one_row 1.0000" in printed
    assert "fails_on_one_row/exception 3." in printed
    rows = evaluation_rows(tmp_path)
    assert [row["row"] for row in rows if row["fails_on_one_row"] is None] == [2, 2, 2]
    assert [row["row"] for row in rows if row["token_sum"] is None] == []


def test_figures_by_a_column_and_rows_to_train_on(tiny_checkpoint, tmp_path, capsys):
    reward = f"{__name__}:has_low_bytes"
    settings = {"eval_dataset_name": tiny_run.ROWS, "reward_funcs": [reward], **SAMPLED}
    (tmp_path / "run.yaml").write_text(to_yaml(make_config(tiny_checkpoint, tmp_path, **settings)))
    assert cli.main(["eval", str(tmp_path / "run.yaml"), "--by", "solution", "--keep", "0.1..0.9"]) == 0
    by_solution = json.loads((tmp_path / "evaluation" / "summary.json").read_text())["by"]["solution"]
    assert {value: metrics["num_samples"] for value, metrics in by_solution.items()} == {
        str(digit): 2.0 if digit < 2 else 1.0 for digit in range(10)
    }
    rates: dict[str, list[float]] = {}
    for row in evaluation_rows(tmp_path):
        rates.setdefault(row["sample_id"], []).append(row["has_low_bytes"])
    expected = {sample: sum(scores) / 3 for sample, scores in rates.items() if 0 < sum(scores) < 3}
    assert 0 < len(expected) < tiny_run.NUM_ROWS

    kept = load_rows(DataConfig(dataset_name=str(tmp_path / "evaluation" / "kept.parquet")), "train")
    assert {sample.sample_id: sample.columns["success_rate"] for sample in kept} == expected
    printed = capsys.readouterr().out
    assert f"{len(expected)} samples have a success rate of 0.1 to 0.9 by has_low_bytes: train on them" in printed
    assert "\nsolution  samples  has_low_bytes\n0         2        " in printed
    dataset = {"dataset_name": str(tmp_path / "evaluation" / "kept.parquet"), "max_steps": 1}
    assert train(make_config(tiny_checkpoint, tmp_path / "run", **dataset))["optimizer_steps"] == 1


def test_several_checkpoints_are_compared(tiny_checkpoint, tmp_path, capsys):
    config = make_config(tiny_checkpoint, tmp_path / "run", eval_dataset_name=tiny_run.HELD_OUT_ROWS, max_steps=2)
    train(config)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    flags = [f"--checkpoint={tmp_path / 'run' / name}" for name in ("checkpoint-1", "checkpoint-2")]
    assert cli.main(["eval", str(tmp_path / "run.yaml"), *flags, f"output_dir={tmp_path / 'eval'}"]) == 0
    evaluation = tmp_path / "eval" / "evaluation"
    compared = json.loads((evaluation / "comparison.json").read_text())
    lines = metric_lines(tmp_path / "run")
    assert compared["checkpoint-1"]["reward"] != compared["checkpoint-2"]["reward"]
    for name in compared:
        differences = compared[name].pop("differences", [])
        assert json.loads((evaluation / name / "summary.json").read_text()) == compared[name]
        assert [(change["name"], change["num"]) for change in differences] == (
            [("reward", 5)] if name == "checkpoint-2" else []
        )
        (image,) = {row["images"][0] for row in pyarrow.parquet.read_table(
            evaluation / name / "completions.parquet").to_pylist() if row["row"] == 0}  # fmt: skip
        assert (evaluation / name / image).resolve().parent == evaluation / "images"
    assert compared["checkpoint-2"] == {k: lines[-1][f"eval_{k}"] for k in compared["checkpoint-2"]}
    page = build_page(read_runs([tmp_path / "eval"]))
    differ = page.partition("Settings that differ")[2].partition("</table>")[0]
    assert all(flag.partition("=")[2] in differ for flag in flags)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[1:4]] == [
        ["checkpoint", "samples"], ["checkpoint-1", "5"], ["checkpoint-2", "5"],
    ]  # fmt: skip
    gain = compared["checkpoint-2"]["reward"] - compared["checkpoint-1"]["reward"]
    assert [line.split() for line in printed[5:7]] == [
        ["compared", "with", "checkpoint-1", "score", "difference", "95%", "interval", "rows"],
        ["checkpoint-2", "reward", f"{gain:+.4f}", "too", "few", "values", "(5)", "5"],
    ]
    assert cli.main(["eval", str(tmp_path / "run.yaml"), f"output_dir={tmp_path / 'eval'}"]) == 0
    assert not (evaluation / "comparison.json").exists()  # or the report would show it again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EvaluationOptions(by=["sauce"]), "--by sauce: .* id, solution"),
        (EvaluationOptions(keep=(0.1, 0.9)), "--keep 0.1..0.9: .*rollout.num_generations_eval 1"),
    ],
)
def test_options_that_cannot_be_met_are_refused_before_the_model_is_loaded(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        evaluate_run(make_config("no/such/model", tmp_path, eval_dataset_name=tiny_run.HELD_OUT_ROWS), options)
