"""Workers build what the sampler draws next: the run is the same as without them, and what goes wrong comes out."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rl_vlm.checkpoint import store
from rl_vlm.config.describe import to_yaml
from rl_vlm.data.loader import PromptLoader
from rl_vlm.data.sampler import Draw
from rl_vlm.errors import DataError, TrainingError
from rl_vlm.run.run import Run, train
from tests.helpers import tiny_run
from tests.helpers.tiny_run import completions, make_config, metric_lines, weights
from tests.unit.data.test_loader import NUM_ROWS, facts, make_prefetcher, step


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., PromptLoader]]:
    """Makes prefetchers, and closes them."""
    made: list[PromptLoader] = []

    def make(*args: Any, **settings: Any) -> PromptLoader:
        made.append(make_prefetcher(tmp_path, *args, **settings))
        return made[-1]

    yield make
    for prefetcher in made:
        prefetcher.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def shared_memory() -> set[str]:
    """Blocks that torch shares by name, of all processes."""
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


def test_workers_build_ahead_once_per_prompt_while_the_cursor_stays_and_close_ends_them(make):
    children, blocks = set(multiprocessing.active_children()), shared_memory()
    prefetcher = make(num_workers=2)
    built = prefetcher.source.builder.built
    first = step(prefetcher)
    assert {pid for *_, pid in facts(first)} == {os.getpid()}
    assert [draws for draws, _ in prefetcher.ahead] == [[Draw(0, 2), Draw(0, 3)], [Draw(0, 4), Draw(0, 5)]]
    wait_until(lambda: len(built()) == 2 + 2 * 2)  # two workers, one window each
    assert prefetcher.sampler.cursor == 2
    for window in range(1, 4):
        prompts = step(prefetcher)
        rows = [2 * window, 2 * window + 1]
        assert [row for row, *_ in facts(prompts)] == rows
        assert prefetcher.sampler.cursor == 2 * (window + 1)
        assert [prompt.sample.images[0].getpixel((0, 0)) for prompt in prompts] == [(row, 0, 0) for row in rows]
        assert [prompt.mm_inputs["pixel_values"].tolist() for prompt in prompts] == [[[row] * 3] * 2 for row in rows]
        assert all((threads, cuda) == (1, 0) and pid != os.getpid() for _, threads, cuda, pid in facts(prompts))
        assert all("digest" in vars(prompt) for prompt in prompts)  # hashed in the worker
    wait_until(lambda: len(built()) == NUM_ROWS + 4)
    assert sorted(row for row, _ in built()) == sorted([*range(NUM_ROWS), 0, 1, 2, 3])

    workers = set(multiprocessing.active_children()) - children
    assert len(workers) == 2
    prefetcher.close()
    prefetcher.close()  # may come twice
    assert not any(worker.is_alive() for worker in workers)
    assert facts(prompts)[0][0] == 6  # what was received stays
    del prompts
    wait_until(lambda: shared_memory() <= blocks)


def test_a_broken_image_is_the_error_that_it_is_without_workers_and_its_step_can_be_done_again(make, tmp_path):
    alone, prefetcher = make(num_workers=0), make(num_workers=1)
    (tmp_path / "3.png").write_bytes(b"no image")
    for each in (alone, prefetcher):
        step(each)
    cursor = prefetcher.sampler.state_dict()
    with pytest.raises(DataError) as expected:
        step(alone)
    with pytest.raises(DataError) as found:
        step(prefetcher)
    assert str(found.value) == str(expected.value)
    assert str(found.value).startswith(
        f"rows, row 3, column image, {tmp_path}/3.png: the image cannot be read: not an image"
    )

    prefetcher.sampler.load_state_dict(cursor)
    Image.new("RGB", (4, 3)).save(tmp_path / "3.png")
    assert [row for row, *_ in facts(step(prefetcher))] == [2, 3]
    assert prefetcher.ahead[0][0] == [Draw(0, 4), Draw(0, 5)]
    assert [row for row, *_ in facts(step(prefetcher))] == [4, 5]


def test_a_worker_that_dies_is_named(make):
    prefetcher = make(kill=3)
    step(prefetcher)
    with pytest.raises(TrainingError, match=r"/dev/shm"):
        step(prefetcher)
    assert prefetcher.workers is None and not prefetcher.ahead


# Whole runs

WINDOW = {
    "gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 6,
    "reward_funcs": [tiny_run.TOKEN_SUM, tiny_run.COIN],
}  # fmt: skip


def assert_same_run(found: Path, expected: Path) -> None:
    last = f"checkpoint-{WINDOW['max_steps']}"
    assert metric_lines(found) == metric_lines(expected)
    assert completions(found) == completions(expected)
    ours, theirs = weights(found / last), weights(expected / last)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Killed(BaseException):
    """Stands for a kill: nothing of the trainer runs after it."""


@pytest.mark.slow
def test_a_run_with_workers_killed_in_a_window_and_resumed_equals_one_without(tiny_checkpoint, tmp_path, monkeypatch):
    train(make_config(tiny_checkpoint, tmp_path / "without", **WINDOW))
    settings = {**WINDOW, "dataloader_num_workers": 1}

    def record_and_die(run: Run, line: dict[str, Any]) -> None:
        run.directory.append_metrics(line)
        if line["step"] == 3:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "write_metrics", record_and_die)
        train(make_config(tiny_checkpoint, tmp_path / "with", **settings))
    assert store.complete(tmp_path / "with")[-1].name == "checkpoint-2"  # of four updates of its window
    train(make_config(tiny_checkpoint, tmp_path / "with", **settings, resume_from_checkpoint="auto"))
    assert_same_run(tmp_path / "with", tmp_path / "without")


def children_of(pid: int) -> list[int]:
    """Processes, not threads, that a process has started with `spawn`."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in path.read_text().split()]
    return [child for child in found if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to list processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_run_leaves_no_worker_and_no_memory(number, tiny_checkpoint, tmp_path):
    blocks = shared_memory()
    config = make_config(tiny_checkpoint, tmp_path / "run", max_steps=10_000, save_steps=0, dataloader_num_workers=2)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "launch.train", str(tmp_path / "run.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        log = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 3)  # the second window's workers
        workers = children_of(process.pid)
        assert len(workers) >= 2
        send = os.killpg if number == signal.SIGINT else os.kill  # a terminal interrupts the whole group
        send(process.pid, number)
        assert process.wait(60) != 0
        wait_until(lambda: not any(map(is_running, workers)))
        wait_until(lambda: shared_memory() <= blocks)
    finally:
        process.kill()
