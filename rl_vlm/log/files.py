"""Files that are written completely or not at all, and disk errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_vlm.errors import CheckpointError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, then move it to `path`. Several processes can do so at once."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    yield unfinished
    os.replace(unfinished, path)


def write_file(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    with atomic_write(path) as unfinished:
        unfinished.write_bytes(content)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise CheckpointError if the block cannot write a file in `path`. Existing checkpoints stay complete."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"could not write in {path}: {error}; resume from the last checkpoint") from error
