"""One process of two gets a signal, dies, is stopped or fails: how the run ends, and that it continues exactly."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.checkpoint import store
from rl_vlm.config.describe import to_yaml
from tests.helpers import ending, tiny_run
from tests.helpers.ending import MARK, none_is_left, processes_of
from tests.helpers.resuming import NUM_STEPS, assert_same_run
from tests.helpers.sharded_runs import launcher_file
from tests.helpers.tiny_run import make_config, metric_lines
from tests.helpers.two_processes import CPU, launch, start

ON_TWO = ("--config_file", str(CPU), "--num_processes", "2")
RESTARTED = ("--max_restarts", "1")


def write_config(directory: Path, model: Path, **settings: Any) -> str:
    """Write the settings of a run in `directory`, and return the file's path."""
    path = directory.with_suffix(".yaml")
    given = {"prompts_per_step": 4, "max_steps": NUM_STEPS, "resume_from_checkpoint": "auto", **settings}
    path.write_text(to_yaml(make_config(model, directory, **given)))
    return str(path)


def signalling(number: int, rank: int, done: Path) -> list[Any]:
    """Reward functions, of which the last sends a signal after one of two groups of the third step."""
    kwargs = {"number": number, "rank": rank, "done": str(done)}
    function = {"function": f"{ending.__name__}:signal_itself", "name": "sum", "calls": "group", "kwargs": kwargs}
    return [tiny_run.COIN, function]


@pytest.fixture(scope="module")
def straight(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes that gets no signal."""
    directory = tmp_path_factory.mktemp("straight") / "run"
    path = write_config(directory, tiny_checkpoint, reward_funcs=signalling(0, 0, directory))
    done = launch(*ON_TWO, "-m", "launch.train", path)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize(
    ("number", "rank", "status", "settings"),
    [
        (signal.SIGTERM, 1, 143, {"save_steps": 0}),
        pytest.param(signal.SIGINT, 0, 130, {"save_steps": 0}, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 1, 143, {"save_steps": 0, "dataloader_num_workers": 1}, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 1, -9, {"save_steps": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_process_ends_continues_exactly(
    number, rank, status, settings, straight, tiny_checkpoint, tmp_path
):
    run = tmp_path / "run"
    settings = {"reward_funcs": signalling(number, rank, tmp_path / "done"), **settings}
    path = write_config(run, tiny_checkpoint, **settings)
    variables = {MARK: str(run)}
    done = launch(*ON_TWO, *RESTARTED, "-m", "launch.train", path, environment=variables)
    assert done.returncode == 0, done.stderr
    assert f"exitcode: {status}" in done.stderr
    if number == signal.SIGKILL:
        assert "rank 1 (process" in done.stderr and "died. " in done.stderr
        assert "resuming from checkpoint-" in done.stderr  # the second one may not be complete yet
    else:
        assert "resuming from checkpoint-2 (step 2 of 5)" in done.stderr
        assert "Interrupted. The newest checkpoint is" in done.stderr
    assert_same_run(run, straight)
    assert none_is_left(str(run))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "settings"), [("fsdp2", {}), ("zero3", {"ds3_gather_for_generation": False})])
def test_ranks_that_generate_together_stop_together(engine, settings, tiny_checkpoint, tmp_path):
    for name, number in (("straight", 0), ("stopped", signal.SIGTERM)):
        rewards = signalling(number, 1, tmp_path / "done")
        path = write_config(tmp_path / name, tiny_checkpoint, reward_funcs=rewards, save_steps=0, **settings)
        file = str(launcher_file(engine, tmp_path))
        done = launch("--config_file", file, *RESTARTED, "-m", "launch.train", path)
        assert done.returncode == 0, done.stderr
        (tmp_path / "done").unlink(missing_ok=True)
    assert "resuming from checkpoint-2 (step 2 of 5)" in done.stderr
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


def test_a_stopped_process_ends_the_others(tiny_checkpoint, tmp_path):
    rewards = signalling(signal.SIGSTOP, 0, tmp_path / "done")
    path = write_config(tmp_path / "run", tiny_checkpoint, reward_funcs=rewards, lost_rank_seconds=5.0)
    begin = time.monotonic()
    variables = {MARK: str(tmp_path), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
    done = launch(*ON_TWO, "-m", "launch.train", path, environment=variables)
    assert done.returncode == 1
    assert "rank 0 (process" in done.stderr
    assert "in signal_itself" in done.stderr.partition("gave no sign of life")[2]  # where it was
    assert time.monotonic() - begin < 200
    assert none_is_left(str(tmp_path))


def test_a_slow_reward_is_no_hang_and_a_failure_is_shown_by_all(tiny_checkpoint, tmp_path):
    slow = {"function": f"{ending.__name__}:slow", "timeout": 120.0}
    path = write_config(tmp_path / "run", tiny_checkpoint, reward_funcs=[slow], ddp_timeout=20.0)
    variables = {MARK: str(tmp_path)}
    done = launch(*ON_TWO, "-m", ending.__name__, path, environment=variables)
    assert done.returncode == 1
    lines = metric_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["reward"] > 0 and not any(name.startswith("reward_faults/") for name in lines[0])
    shown_by_rank_0 = done.stderr.partition(f"train {path} failed:\nrank 1 (process ")[2]
    assert "KeyError: 'a bug of the trainer'" in shown_by_rank_0
    assert none_is_left(str(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_saves_the_run(number, tiny_checkpoint, tmp_path):
    run = tmp_path / "run"
    path = write_config(run, tiny_checkpoint, save_steps=0, max_steps=100_000)
    process = start(*ON_TWO, "-m", "launch.train", path, environment={MARK: str(run)})
    lines, end = run / "metrics.jsonl", time.monotonic() + 200
    while not (lines.exists() and lines.read_text().count("\n") >= 2):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.2)
    assert len(processes_of(str(run))) >= 3
    process.send_signal(number)
    _, log = process.communicate(timeout=60)  # ranks without a launcher write more than a pipe holds
    assert none_is_left(str(run))
    assert process.returncode != 0
    (saved,) = store.complete(run)
    assert store.step_of(saved) == len(metric_lines(run)), log
