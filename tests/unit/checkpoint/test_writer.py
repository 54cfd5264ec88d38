"""Checkpoints that are written while training goes on: what waits for what, and what is left after a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_vlm.checkpoint import store
from rl_vlm.checkpoint.writer import CheckpointWriter
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import CheckpointError
from tests.helpers.checkpoints import MadeUpFiles, SlowFiles


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(tmp_path, Ranks())
    yield made
    made.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_training_goes_on_while_files_are_written(writer, tmp_path):
    files, pruned = SlowFiles(), []
    writer.write(1, lambda: files, lambda: pruned.append(1))
    writer.continue_if_ready()
    assert names(tmp_path) == ["unfinished-checkpoint-1"] and not pruned
    assert writer.take_seconds() < 5  # although the files may never be written
    files.may_go.set()
    while writer.pending:
        writer.continue_if_ready()
    assert names(tmp_path) == ["checkpoint-1"] and pruned == [1]
    assert store.find("auto", tmp_path) == tmp_path / "checkpoint-1"


def test_a_second_save_waits_for_the_first_and_finish_for_both(writer, tmp_path):
    first, second = SlowFiles(), SlowFiles()
    writer.write(1, lambda: first, lambda: None)
    threading.Timer(0.2, first.may_go.set).start()
    writer.write(2, lambda: second, lambda: None)
    assert names(tmp_path) == ["checkpoint-1", "unfinished-checkpoint-2"]
    assert writer.take_seconds() > 0.15
    second.may_go.set()
    writer.finish()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_a_failure_behind_training_is_raised_once_and_leaves_earlier_ones(writer, tmp_path):
    writer.write(1, lambda: MadeUpFiles(lambda directory: None), lambda: None)

    def fail(directory: Path) -> None:
        (directory / "model.bin").write_text("half")
        raise OSError(28, "No space left on device")

    pruned = []
    writer.write(2, lambda: MadeUpFiles(fail), lambda: pruned.append(2))
    with pytest.raises(CheckpointError, match=r"checkpoint-2 .*No space left.*complete checkpoints: checkpoint-1"):
        writer.finish()
    assert names(tmp_path) == ["checkpoint-1"] and not pruned
    writer.finish()  # nothing is left to wait for


def test_a_disk_without_space_is_found_before_anything_is_written(writer, tmp_path):
    too_much = MadeUpFiles(lambda directory: None, num_bytes=2**60)
    with pytest.raises(CheckpointError, match=r"needs 1073741824.00 GiB, but .* GiB are free"):
        writer.write(3, lambda: too_much, lambda: None)
    assert names(tmp_path) == []


def test_a_complete_checkpoint_is_not_copied_again(writer):
    writer.write(1, lambda: MadeUpFiles(lambda directory: None), lambda: None)
    writer.write(1, lambda: pytest.fail("copied"), lambda: None)
