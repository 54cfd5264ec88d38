"""What a run leaves behind if a step or an evaluation fails, and that it can be resumed from there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.checkpoint import store
from rl_vlm.config.describe import to_yaml
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import CheckpointError, ConfigError, TrainingError
from rl_vlm.evaluation.evaluator import Evaluator
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.passes.passes import Passes
from rl_vlm.rollout.collector import Collector
from rl_vlm.run.run import Run, train
from tests.helpers import tiny_run
from tests.helpers.builders import make_group, make_prompt
from tests.helpers.resuming import assert_same_run, config_of, resumed
from tests.helpers.tiny_run import make_config, metric_lines
from tests.helpers.two_processes import launch


def fail_in(patch: pytest.MonkeyPatch, owner: Any, method: str, call: int) -> None:
    """Let the method do its work at its `call`-th call, from 1, and then fail."""
    function, calls = getattr(owner, method), []

    def failing(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        calls.append(method)
        if len(calls) == call:
            raise RuntimeError("CUDA error: an illegal memory access")
        return result

    patch.setattr(owner, method, failing)


@pytest.mark.parametrize(
    ("owner", "method", "variant"),
    [
        (DDP, "backward", "window"),
        (Collector, "score", "window"),
        pytest.param(Collector, "score", "partial_rollouts", marks=pytest.mark.slow),
        pytest.param(DDP, "backward", "partial_rollouts", marks=pytest.mark.slow),
        pytest.param(DDP, "backward", "full", marks=pytest.mark.slow),
        pytest.param(Collector, "score", "full", marks=pytest.mark.slow),
    ],
)
def test_an_error_in_a_step_saves_the_step_before(owner, method, variant, tiny_checkpoint, tmp_path, monkeypatch):
    """`Collector.score` has drawn random numbers by then: the coin's."""
    train(config_of(variant, tiny_checkpoint, tmp_path / "straight"))
    config = config_of(variant, tiny_checkpoint, tmp_path / "failed", save_steps=0)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="illegal memory access"):
        fail_in(patch, owner, method, call=2)
        train(config)
    (saved,) = store.complete(tmp_path / "failed")
    assert store.step_of(saved) >= 1
    train(resumed(config))
    assert_same_run(tmp_path / "failed", tmp_path / "straight")


@pytest.mark.slow
def test_an_error_in_an_evaluation_is_followed_by_the_evaluation(tiny_checkpoint, tmp_path, monkeypatch):
    settings = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, "eval_steps": 2, "eval_on_start": False}
    train(config_of("full", tiny_checkpoint, tmp_path / "straight", **settings))
    config = config_of("full", tiny_checkpoint, tmp_path / "failed", save_steps=0, **settings)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="illegal memory access"):
        fail_in(patch, Evaluator, "evaluate_rows", call=2)
        train(config)
    assert store.complete(tmp_path / "failed") == [tmp_path / "failed" / "checkpoint-4"]
    assert [line["step"] for line in metric_lines(tmp_path / "failed")] == [1, 2, 3, 4]
    train(resumed(config))
    assert_same_run(tmp_path / "failed", tmp_path / "straight")


def test_an_error_within_an_update_saves_nothing(tiny_checkpoint, tmp_path, monkeypatch, caplog):
    fail_in(monkeypatch, DDP, "update", call=3)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(make_config(tiny_checkpoint, tmp_path, save_steps=1))
    assert [path.name for path in store.complete(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    assert "step, 2, is not saved: the error came within the update" in caplog.text
    assert "checkpoint-1, checkpoint-2" in caplog.text


def test_an_error_on_one_of_two_ranks_saves_nothing(tiny_checkpoint, tmp_path, monkeypatch, caplog):
    run = Run(make_config(tiny_checkpoint, tmp_path, save_steps=0))
    run.progress.global_step = 1
    monkeypatch.setattr(Ranks, "world_size", 2)
    with pytest.raises(torch.OutOfMemoryError), run.saved_on_failure():
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert store.complete(tmp_path) == [] and "others cannot join" in caplog.text
    monkeypatch.undo()
    with pytest.raises(TrainingError), run.saved_on_failure(), run.ranks.agree():
        raise TrainingError("on all ranks")
    assert store.complete(tmp_path) == [tmp_path / "checkpoint-1"]
    run.close()


def rising_fault(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """A reward that fails from the third step on."""
    if trainer_state.global_step >= 2:
        raise KeyError("answer")
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def test_an_error_of_all_ranks_saves_the_step_before(tiny_checkpoint, tmp_path):
    settings = {"reward_funcs": [f"{__name__}:rising_fault"], "save_steps": 0}
    (tmp_path / "run.yaml").write_text(to_yaml(make_config(tiny_checkpoint, tmp_path / "run", **settings)))
    cpu = ("--config_file", "launch/accelerate/cpu.yaml")
    done = launch(*cpu, "-m", "launch.train", str(tmp_path / "run.yaml"))
    assert done.returncode != 0 and "rising_fault/exception: raised KeyError" in done.stderr
    assert [path.name for path in store.complete(tmp_path / "run")] == ["checkpoint-2"]


def test_a_batch_that_cannot_be_written_changes_nothing(tiny_checkpoint, tmp_path, monkeypatch, caplog):
    gradients = Passes.gradients

    def not_a_number(passes: Passes, *arguments: Any, **named: Any) -> Any:
        loss, metrics = gradients(passes, *arguments, **named)
        step = passes.recovery.budget.progress.global_step
        return (loss * float("nan") if step == 2 else loss), metrics

    monkeypatch.setattr(Passes, "gradients", not_a_number)
    train(config_of("full", tiny_checkpoint, tmp_path / "written"))
    (tmp_path / "not" / "nonfinite-step-3-rank-0.pt").mkdir(parents=True)  # a directory in the place of the file
    train(config_of("full", tiny_checkpoint, tmp_path / "not"))
    assert_same_run(tmp_path / "not", tmp_path / "written")
    assert "step 3 was skipped, and its batch could not be written" in caplog.text


def break_weights(run: Run) -> None:
    with torch.no_grad():
        next(run.trainer.policy.parameters()).view(-1)[0] = float("nan")


def test_weights_that_are_not_finite_are_not_saved(tiny_checkpoint, tmp_path, monkeypatch):
    config = make_config(tiny_checkpoint, tmp_path, max_steps=9, save_steps=1, save_total_limit=1)
    save = Run.save

    def save_broken(run: Run) -> None:
        if run.progress.global_step == 3:
            break_weights(run)
        save(run)

    monkeypatch.setattr(Run, "save", save_broken)
    with pytest.raises(TrainingError, match=r"1 weights have .* not finite after step 3, such as .*\(checkpoint-2\)"):
        train(config)
    assert [path.name for path in store.complete(tmp_path)] == ["checkpoint-2"]


def test_nothing_is_pruned_while_steps_are_skipped(tiny_checkpoint, tmp_path):
    run = Run(make_config(tiny_checkpoint, tmp_path, save_total_limit=1))
    for step, skipped in ((1, 0), (2, 1), (3, 2), (4, 0)):
        run.progress.global_step, run.progress.nonfinite_in_a_row = step, skipped
        run.save()
        run.writer.finish()
        expected = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [4]}[step]
        assert [store.step_of(path) for path in store.complete(tmp_path)] == expected
    run.close()


def test_a_norm_that_is_not_finite_on_another_rank_skips_the_update_on_all(tiny_checkpoint, tmp_path, monkeypatch):
    run = Run(make_config(tiny_checkpoint, tmp_path))
    updates: list[str] = []
    monkeypatch.setattr(run.trainer.optimizer.torch_optimizer, "step", lambda: updates.append("update"))
    of_others = iter([0.0, 0.0, 0.0, 1.0])  # loss and number of norms that are not finite, of two steps
    monkeypatch.setattr(Ranks, "sum", lambda _, values: [values[0] + next(of_others)])
    groups = [make_group(make_prompt(tiny_checkpoint, []), [2])]
    monkeypatch.setattr(run.trainer, "stop_if_nonfinite", lambda *_: None)
    run.trainer.update(torch.tensor(0.5), groups, StepMetrics())
    assert updates == ["update"]
    metrics = StepMetrics()
    run.trainer.update(torch.tensor(0.5), groups, metrics)
    assert updates == ["update"] and metrics.means["skipped_updates/nonfinite"] == [1.0, 1]
    run.close()


def test_two_runs_in_one_directory(tiny_checkpoint, tmp_path):
    config = make_config(tiny_checkpoint, tmp_path)
    run = Run(config)
    with pytest.raises(
        ConfigError, match=rf"output_dir: .* is in use by process {os.getpid()} on .*Two runs would mix"
    ):
        Run(config)
    run.close()
    Run(make_config(tiny_checkpoint, tmp_path, overwrite_output_dir=True)).close()


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_an_output_dir_that_cannot_be_written_is_found_before_the_model_is_loaded(path, tiny_checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"train.output_dir: .* cannot be written to"):
        Run(make_config("no-such-model", tmp_path / path))


@pytest.mark.parametrize(
    ("name", "is_directory"),
    [("checkpoint-9", False), ("unfinished-checkpoint-9", False), ("completions", False), ("metrics.jsonl", True)],
)
def test_a_file_in_place_of_a_directory_is_refused_before_anything_is_deleted(
    name, is_directory, tiny_checkpoint, tmp_path
):
    kept = tmp_path / "summary.json"
    kept.touch()
    (tmp_path / name).mkdir() if is_directory else (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=rf"{tmp_path / name} is a (file|directory), but a run writes a"):
        Run(make_config(tiny_checkpoint, tmp_path, overwrite_output_dir=True))
    assert kept.exists()


@pytest.mark.parametrize("become_of", [lambda run: run.rename(run.with_name("renamed")), shutil.rmtree])
def test_a_run_whose_directory_is_renamed_or_removed_stops(become_of, tiny_checkpoint, tmp_path, monkeypatch):
    run, score = tmp_path / "run", Collector.score

    def score_and_move(collector: Collector, groups: Any, state: Any, metrics: Any) -> Any:
        if state.global_step == 1:
            become_of(run)
        return score(collector, groups, state, metrics)

    monkeypatch.setattr(Collector, "score", score_and_move)
    with pytest.raises(CheckpointError, match=rf"{run} is no longer the directory that this run has locked"):
        train(make_config(tiny_checkpoint, run, async_save=False))
    assert not run.exists()


LAUNCHER = """
import subprocess, sys, time
command = ["env", "ACCELERATE_MIXED_PRECISION=no", sys.executable, "-m", "launch.train", sys.argv[1]]
subprocess.Popen(command)
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_rank_ends_with_its_launcher(tiny_checkpoint, tmp_path):
    config = make_config(tiny_checkpoint, tmp_path / "run", max_steps=100_000, save_steps=0)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    lines = tmp_path / "run" / "metrics.jsonl"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path / "run.yaml")], cwd=Path.cwd())
    wait_for(lambda: lines.exists() and lines.stat().st_size > 0)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    time.sleep(5.0)
    size = lines.stat().st_size
    time.sleep(2.0)
    assert lines.stat().st_size == size
    Run(make_config(tiny_checkpoint, tmp_path / "run", overwrite_output_dir=True)).close()  # the lock is free


@pytest.mark.slow
def test_processes_that_end_right_after_a_collective_do_not_abort():
    command = [sys.executable, "-m", "tests.integration.leave_at_once", "10"]
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_signal_before_two_processes_are_joined_ends_both_and_is_named():
    """Without a launcher that would end the other."""
    command = [sys.executable, "-m", "tests.integration.leave_at_once", "1", "signalled"]
    result = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    said = re.findall(r"rank 1 \(process \d+ on .*\) was sent SIGTERM: all ranks stop", result.stderr)
    assert len(said) == 2, result.stderr
    assert "has not stopped within" not in result.stderr  # by the join itself, and not by the limit for a stop


LATE = """
import os, sys, time
time.sleep(3.0 * (os.environ["RANK"] == "0"))
from launch import cli
cli.end_process_after(lambda: cli.run("train", sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_process_that_starts_late_refuses_as_well(tmp_path):
    """The launcher ends the others when the first one has ended, and the first of a machine prints the message."""
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "run.yaml").write_text("max_step: 3\n")
    cpu = ("--config_file", "launch/accelerate/cpu.yaml", "--num_processes", "2")
    done = launch(*cpu, str(tmp_path / "late.py"), str(tmp_path / "run.yaml"))
    assert "unknown" in done.stderr and "max_step" in done.stderr
    assert "exitcode  : 2" in done.stderr and "exitcode  : -15" not in done.stderr
