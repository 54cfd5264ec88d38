"""A disk that becomes full at 20 random places of a save: the checkpoint before it loads, and the run continues."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_vlm.checkpoint import store
from rl_vlm.errors import CheckpointError, RLVLMError
from rl_vlm.run.run import train
from tests.helpers.evaluating import evaluate_run
from tests.helpers.resuming import NUM_STEPS, REWARDS, assert_same_run, resumed
from tests.helpers.tiny_run import make_config

NUM_OFFSETS = 20
MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system in memory, of 64 MiB if the test has no parameter for it."""
    disk, size = tmp_path / "disk", getattr(request, "param", "64m")
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a file system can only be mounted by root: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Write a file that leaves so many bytes free, up to a page, and return it."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        for _ in range((shutil.disk_usage(disk).free - leave) // 4096):
            file.write(b"\0" * 4096)
    return filler


@pytest.mark.parametrize("small_disk", ["4k", "8k"], indirect=True)
def test_a_disk_that_is_full_at_the_start_is_named(tiny_checkpoint, small_disk):
    with pytest.raises(RLVLMError, match=rf"{small_disk}.*(No space left on device|are free: make room)"):
        train(make_config(tiny_checkpoint, small_disk / "run", max_steps=1))


@pytest.mark.parametrize("small_disk", ["4k", "8k"], indirect=True)
def test_a_disk_that_is_full_at_the_start_of_an_evaluation_is_named(tiny_checkpoint, small_disk):
    config = make_config(tiny_checkpoint, small_disk / "run", eval_dataset_name="tests.helpers.tiny_run:rows")
    with pytest.raises(RLVLMError, match=rf"{small_disk}.*No space left on device"):
        evaluate_run(config)


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_that_becomes_full_within_a_save(in_background, tiny_checkpoint, small_disk, tmp_path, monkeypatch):
    settings = {"max_steps": NUM_STEPS, "reward_funcs": REWARDS, "async_save": in_background}
    straight = make_config(tiny_checkpoint, tmp_path / "straight", **settings)
    train(straight)
    saved = store.checkpoint_path(tmp_path / "straight", 2)
    size = sum((saved / name).stat().st_size for name in store.file_names(saved))
    draw, begin = random.Random(0), store.begin
    for number in range(NUM_OFFSETS):
        config = make_config(tiny_checkpoint, small_disk / "run", **settings)
        offset, step = draw.randrange(size), draw.randint(2, NUM_STEPS)

        def begin_and_fill(unfinished: Path, offset: int = offset, step: int = step) -> None:
            begin(unfinished)
            if unfinished.name == f"unfinished-checkpoint-{step}":  # behind the check of the free space
                fill(small_disk, offset)

        with monkeypatch.context() as patch:
            patch.setattr(store, "begin", begin_and_fill)
            with pytest.raises(CheckpointError) as failed:
                train(config)
        message = str(failed.value)
        assert "No space left on device" in message or "are free: make room" in message, message
        assert str(small_disk) in message
        newest = store.find("auto", small_disk / "run")
        assert newest == small_disk / "run" / f"checkpoint-{step - 1}", (number, offset, step)
        assert not list((small_disk / "run").glob("unfinished-*"))
        (small_disk / "filler").unlink()
        train(resumed(config))
        assert_same_run(small_disk / "run", tmp_path / "straight")
        shutil.rmtree(small_disk / "run")
