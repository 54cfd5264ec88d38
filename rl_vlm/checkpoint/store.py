"""Checkpoints are complete or absent: they are written to another directory, flushed to disk, then renamed.

checkpoint-40/
    model.safetensors, model-00001-of-00002.safetensors, adapter_model.safetensors, config.json, …
                            the model or the adapter, in the format of `save_pretrained`
    trainer_state.json      step, versions of the weights, evaluations, settings, fingerprints of data and model
    optimizer/              moments by the names of the weights, one file per rank of a sharded run
    reference/              the reference model, if it moves
    rank_0.pt               random states, position in the data and generation windows of each rank
    manifest.json           every file with its size and SHA-256; a checkpoint without one is ignored
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rl_vlm.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RESUMED = {
    "weights": r"[^/]+\.safetensors",
    "trainer state": r"trainer_state\.json",
    "optimizer state": r"optimizer/.+",
    "random states": r"rank_\d+\.pt",
}
"""Parts that a resumed run needs, and the names of their files."""


def checkpoint_path(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def unfinished_path(output_dir: Path, step: int) -> Path:
    return output_dir / f"unfinished-checkpoint-{step}"


def begin(unfinished: Path) -> None:
    """Create an empty directory for the files of a checkpoint."""
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def file_names(directory: Path) -> list[str]:
    """Return the relative paths of all files in a directory and its subdirectories."""
    return [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]


def check_space(directory: Path, num_bytes: int, what: str = "a checkpoint") -> None:
    """Raise CheckpointError if `num_bytes` do not fit on the disk. `what` names the files in the message."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise CheckpointError(
            f"{what} needs {num_bytes / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are free: make room, or choose a "
            "directory on another disk"
        )


def commit(unfinished: Path, written: Iterable[str]) -> Path:
    """Turn the directory of `begin` into a checkpoint: write the manifest, flush every file, rename.

    `written` are the names of the files that the ranks see. Raises CheckpointError if one of them is missing here.
    """
    files = sorted(unfinished / name for name in set(written))
    if absent := [path.name for path in files if not path.is_file()]:
        raise CheckpointError(
            f"process 0 does not see {absent[0]} of another process in {unfinished}: set train.output_dir to a "
            "directory on a file system that all processes share"
        )
    manifest = {
        str(path.relative_to(unfinished)): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, digests(files), strict=True)
    }
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return put_in_place(unfinished, [*files, unfinished / MANIFEST])


def put_in_place(unfinished: Path, files: Iterable[Path]) -> Path:
    """Flush the files of `unfinished-NAME` to disk, then rename it to NAME, which it replaces. Return the new path."""
    for path in [*files, unfinished]:
        flush(path)
    final = unfinished.with_name(unfinished.name.removeprefix("unfinished-"))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(unfinished, final)
    flush(final.parent)
    return final


def digests(files: list[Path]) -> Iterator[str]:
    """Compute the SHA-256 of each file, on all cores."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return pool.map(digest, files)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def named_errors(output_dir: Path, step: int) -> Iterator[None]:
    """Turn any error in the block into a CheckpointError."""
    try:
        yield
    except Exception as error:  # a full disk is an OSError, torch's RuntimeError, or safetensors' error
        free = shutil.disk_usage(output_dir).free // 2**20 if output_dir.is_dir() else 0
        raise CheckpointError(
            f"could not write checkpoint-{step} in {output_dir} ({error}; {free} MiB free); "
            f"complete checkpoints: {names(output_dir)}"
        ) from error


def read_manifest(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file, by name. Raises CheckpointError if the manifest cannot be read."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())
        return {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint}: {MANIFEST} is damaged or missing, or an earlier version of rl-vlm wrote it ({error!r})"
        ) from error


def check_sizes(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file. Raises CheckpointError if a file is missing or its size differs."""
    files = read_manifest(checkpoint)
    for name, (size, _) in files.items():
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "missing" if found is None else f"of {found} bytes instead of {size}"
            raise CheckpointError(f"{checkpoint} is not a complete checkpoint: {name} is {state}")
    return {name: digest for name, (_, digest) in files.items()}


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file of the manifest exists with the right size. `check` also compares contents."""
    try:
        check_sizes(checkpoint)
    except CheckpointError:
        return False
    return True


def check(checkpoint: Path) -> Path:
    """Return the checkpoint if its files are unchanged, else raise CheckpointError."""
    files = check_sizes(checkpoint)
    try:
        found = list(digests([checkpoint / name for name in files]))
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error}") from error
    changed = [name for (name, digest), other in zip(files.items(), found, strict=True) if digest != other]
    if changed:
        raise CheckpointError(
            f"{checkpoint}: {', '.join(changed)} changed after the checkpoint was written (other SHA-256 than in "
            f"{MANIFEST}). The disk may be failing. Resume from an earlier checkpoint."
        )
    return checkpoint


def check_resumable(checkpoint: Path) -> Path:
    """Return the checkpoint if it is intact and has all parts that a resumed run needs, else raise CheckpointError."""
    files = read_manifest(check(checkpoint))
    for part, pattern in RESUMED.items():
        if not any(re.fullmatch(pattern, name) for name in files):
            raise CheckpointError(
                f"{checkpoint} cannot be resumed: its {MANIFEST} lists no {part}. Resume from another checkpoint"
            )
    return checkpoint


def complete(output_dir: Path) -> list[Path]:
    """Return all complete checkpoints of a run, oldest step first."""
    return list(filter(is_complete, directories(output_dir)))


def directories(output_dir: Path) -> list[Path]:
    """Return the directories named `checkpoint-<digits>`, complete or not, oldest step first."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def names(output_dir: Path) -> str:
    """List the complete checkpoints, for messages."""
    return ", ".join(path.name for path in complete(output_dir)) or "none"


def find(setting: str | None, output_dir: Path) -> Path | None:
    """Return the checkpoint that `resume_from_checkpoint` names, if any.

    `auto` is the newest intact checkpoint. Damaged ones are skipped with a warning. Raises CheckpointError if the named
    checkpoint is incomplete or its contents have changed, or with `auto` if no checkpoint is intact.
    """
    if setting is None:
        return None
    if setting == "auto":
        return newest_intact(output_dir)
    if not is_complete(Path(setting)):
        raise CheckpointError(
            f"{setting} is not a complete checkpoint; complete ones in {output_dir}: {names(output_dir)}"
        )
    return check_resumable(Path(setting))


def newest_intact(output_dir: Path) -> Path | None:
    """Return the newest checkpoint that can be resumed, or None if there is no checkpoint."""
    damage = None
    for path in reversed(directories(output_dir)):
        try:
            return check_resumable(path)
        except CheckpointError as error:
            logger.warning("%s", error)
            damage = damage or error
    if damage is not None:
        raise CheckpointError(
            f"no checkpoint in {output_dir} is intact. {damage}. To start a new run there, set "
            "train.overwrite_output_dir=true without train.resume_from_checkpoint."
        ) from damage
    return None


def prune(output_dir: Path, limit: int | None, keep: Path | None) -> None:
    """Delete the oldest checkpoints beyond `limit`. Never delete `keep` (the best one) or the newest."""
    found = complete(output_dir)
    surplus = len(found) - limit if limit else 0
    for path in [p for p in found[:-1] if p != keep][: max(surplus, 0)]:
        shutil.rmtree(path)
