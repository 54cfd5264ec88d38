import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_vlm.checkpoint import store
from rl_vlm.checkpoint.random_states import random_states, restore_random_states, seed_random_generators
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import CheckpointError
from tests.helpers.checkpoints import RESUMED, write_checkpoint


def save(output_dir: Path, step: int, content: str = "weights") -> Path:
    return write(output_dir, step, lambda directory: write_file(directory / "model.bin", content))


def write(output_dir: Path, step: int, write_files: Callable[[Path], None]) -> Path:
    write_checkpoint(output_dir, step, write_files)
    return store.checkpoint_path(output_dir, step)


def write_file(path: Path, content: str) -> None:
    path.write_text(content)


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())


def test_write_and_find_the_newest(tmp_path):
    assert store.find("auto", tmp_path) is None
    save(tmp_path, 9)
    save(tmp_path, 10)
    assert store.find("auto", tmp_path) == tmp_path / "checkpoint-10"
    assert store.find(str(tmp_path / "checkpoint-9"), tmp_path) == tmp_path / "checkpoint-9"
    assert store.find(None, tmp_path) is None


def test_files_in_folders_are_in_the_manifest(tmp_path):
    def write_files(directory: Path) -> None:
        (directory / "reference").mkdir()
        write_file(directory / "reference" / "model.bin", "reference")

    path = write(tmp_path, 1, write_files)
    os.truncate(path / "reference" / "model.bin", 3)
    assert not store.is_complete(path)


@pytest.mark.parametrize("damage", ["file cut", "file gone", "manifest cut", "manifest gone"])
def test_damaged_checkpoint_is_not_complete(damage, tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    file, kind = damage.split()
    target = path / {"file": "model.bin", "manifest": store.MANIFEST}[file]
    target.unlink() if kind == "gone" else os.truncate(target, 2)
    assert store.complete(tmp_path) == [tmp_path / "checkpoint-1"]


def test_begun_checkpoint_does_not_exist(tmp_path):
    unfinished = store.unfinished_path(tmp_path, 1)
    store.begin(unfinished)
    write_file(unfinished / "model.bin", "weights")
    assert store.complete(tmp_path) == []


def test_failed_write_names_the_way_out_and_leaves_nothing(tmp_path):
    save(tmp_path, 1)

    def fail(directory: Path) -> None:
        write_file(directory / "model.bin", "half")
        raise RuntimeError("file write failed")

    way_out = r"checkpoint-2 .*file write failed.*MiB free.*complete checkpoints: checkpoint-1"
    with pytest.raises(CheckpointError, match=way_out):
        write(tmp_path, 2, fail)
    assert names(tmp_path) == ["checkpoint-1"]


def test_files_that_only_another_process_sees_are_named(tmp_path, monkeypatch):
    """As on two machines whose run directories have the same path and are not the same."""
    ranks = Ranks()
    monkeypatch.setattr(ranks, "gather", lambda values: [*values, "model-2.bin"] if "model-1.bin" in values else values)
    with pytest.raises(CheckpointError, match=r"model-2.bin of another process in .*that all processes share"):
        write_checkpoint(tmp_path, 1, lambda directory: write_file(directory / "model-1.bin", ""), ranks)
    assert list(tmp_path.iterdir()) == []


def test_complete_checkpoint_is_never_written_again(tmp_path):
    save(tmp_path, 1, "first")
    save(tmp_path, 1, "second")
    assert (tmp_path / "checkpoint-1" / "model.bin").read_text() == "first"


def test_incomplete_checkpoint_is_replaced(tmp_path):
    (save(tmp_path, 1, "first") / store.MANIFEST).unlink()
    save(tmp_path, 1, "second")
    assert (tmp_path / "checkpoint-1" / "model.bin").read_text() == "second"


def test_explicit_checkpoint_must_be_complete(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is not a complete checkpoint.*: checkpoint-1"):
        store.find(str(tmp_path / "checkpoint-2"), tmp_path)


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [(None, None, [1, 2, 3]), (2, None, [2, 3]), (1, None, [3]), (2, 1, [1, 3]), (1, 1, [1, 3])],
)
def test_prune_keeps_the_newest_and_the_best(limit, best, left, tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    store.prune(tmp_path, limit, best and store.checkpoint_path(tmp_path, best))
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def draws() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_random_states_survive_a_file_without_code(tmp_path):
    seed_random_generators(7)
    random.gauss(0, 1)
    np.random.randn()  # one value of a pair: the other is part of the state
    torch.save(random_states(), tmp_path / "states.pt")
    expected = (*draws(), np.random.randn())
    draws()
    restore_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    assert (*draws(), np.random.randn()) == expected


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_the_manifest_holds_the_digest_of_each_file(tmp_path):
    manifest = json.loads((save(tmp_path, 1, "abc") / store.MANIFEST).read_text())
    sha256_of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4
    assert manifest["model.bin"] == {"size": 3, "sha256": sha256_of_abc}
    assert manifest.keys() == {"model.bin", *RESUMED}


def test_a_changed_file_is_named_and_auto_takes_the_checkpoint_before(tmp_path, caplog):
    save(tmp_path, 1)
    flip_a_bit(save(tmp_path, 2) / "model.bin")
    with pytest.raises(CheckpointError, match=r"checkpoint-2: model.bin changed after the checkpoint was written"):
        store.find(str(tmp_path / "checkpoint-2"), tmp_path)
    assert store.find("auto", tmp_path) == tmp_path / "checkpoint-1"
    assert "checkpoint-2: model.bin changed" in caplog.text


@pytest.mark.parametrize(
    ("file", "part"),
    zip(RESUMED, ["weights", "trainer state", "optimizer state", "random states"], strict=True),
)
def test_a_checkpoint_without_all_that_a_run_resumes_is_refused_and_auto_takes_the_one_before(file, part, tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    manifest = json.loads((path / store.MANIFEST).read_text())
    del manifest[file]
    (path / store.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"checkpoint-2 cannot be resumed: its manifest.json lists no {part}\."):
        store.find(str(path), tmp_path)
    assert store.find("auto", tmp_path) == tmp_path / "checkpoint-1"


def test_auto_starts_no_new_run_over_damaged_checkpoints(tmp_path):
    flip_a_bit(save(tmp_path, 1) / "model.bin")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact.*checkpoint-1: .*model.bin"):
        store.find("auto", tmp_path)


def test_a_copy_of_a_checkpoint_is_left_alone(tmp_path):
    shutil.copytree(save(tmp_path, 1), tmp_path / "checkpoint-1-good")
    save(tmp_path, 2)
    store.prune(tmp_path, 1, None)
    assert names(tmp_path) == ["checkpoint-1-good", "checkpoint-2"]
    assert store.find("auto", tmp_path) == tmp_path / "checkpoint-2"
    assert store.find(str(tmp_path / "checkpoint-1-good"), tmp_path) == tmp_path / "checkpoint-1-good"


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest gone", "manifest of sizes", "manifest of a list"])
def test_auto_names_what_is_wrong_and_never_starts_over_it(damage, tmp_path, caplog):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    if damage == "cut":
        os.truncate(path / "model.bin", 3)
    elif damage == "gone":
        (path / "model.bin").unlink()
    elif damage == "manifest gone":
        (path / store.MANIFEST).unlink()
    else:
        (path / store.MANIFEST).write_text('{"model.bin": 7}' if damage == "manifest of sizes" else "[1]")
    assert store.find("auto", tmp_path) == tmp_path / "checkpoint-1"
    file = "manifest.json" if "manifest" in damage else "model.bin"
    assert "checkpoint-2" in caplog.text and f"{file} is" in caplog.text
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact.*checkpoint-2"):
        store.find("auto", tmp_path)
