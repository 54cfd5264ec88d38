"""Files that are written completely or not at all, locks on directories, and disk errors."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TextIO

from rl_vlm.config.schema import TrainConfig
from rl_vlm.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

LOCK = "run.lock"
METRICS = "metrics.jsonl"
BUDGET = "micro_batch_tokens.jsonl"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, then move the file to `path`. Several processes can do so at once."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    yield unfinished
    os.replace(unfinished, path)


def check_output(path: Path, option: str) -> None:
    """Raise ConfigError if `option` names a directory, or a file in a directory that does not exist."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: it is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: there is no directory {path.parent}; make it first")


@contextmanager
def output(path: Path, option: str) -> Iterator[Path]:
    """Yield a path to write to, so that the file of `option` is written completely or not at all.

    A pipe or a device, such as /dev/stdout, is written to and never replaced. Raises ConfigError if writing fails.
    """
    check_output(path, option)
    try:
        if path.exists() and not path.is_file():
            yield path
        else:
            with atomic_write(path) as unfinished:
                yield unfinished
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror or error}; name another file") from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    with atomic_write(path) as unfinished:
        unfinished.write_bytes(content)


_held: dict[Path, TextIO] = {}
"""The open locks of the directories that this process holds."""


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Create a directory and hold it in this context.

    Raises ConfigError if another process holds it, or if files cannot be written there.
    """
    with unwritable(path):
        path.mkdir(parents=True, exist_ok=True)
        file = (path / LOCK).open("a+")
    with closing(file):
        hold(path, file)
        os.register_at_fork(after_in_child=file.close)  # a child that outlives the run must not hold the lock
        with unwritable(path):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        _held[path] = file
        try:
            yield
        finally:
            del _held[path]


def hold(path: Path, file: TextIO) -> None:
    """Lock the open file of a directory. Raise ConfigError if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read() or "another process"
        raise ConfigError(
            f"train.output_dir: {path} is in use by {holder}. Two runs would mix their records. Choose another "
            "directory, or wait until that run has ended."
        ) from None
    except OSError as error:  # some network file systems
        logger.warning("%s cannot be locked (%s); do not start a second run there", path, error.strerror)


@contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Raise ConfigError if the block, at the start of a run, cannot write a file in `path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"train.output_dir: {path} cannot be written to: {error}") from error


def check_held(path: Path) -> None:
    """Raise CheckpointError if `path` is in a locked directory of this process that was renamed or removed."""
    for directory, file in _held.items():
        if path.is_relative_to(directory) and not is_same(file, directory / LOCK):
            raise CheckpointError(
                f"{directory} is no longer the directory that this run has locked ({LOCK}): it was renamed or removed. "
                "If it was renamed, resume with train.output_dir set to its new name and "
                "train.resume_from_checkpoint=auto"
            )


def is_same(file: TextIO, path: Path) -> bool:
    """Return whether the open file is the file at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise CheckpointError if the block cannot write a file in `path`, or if `path` is not the locked directory.

    Existing checkpoints stay complete.
    """
    try:
        check_held(path)
        yield
    except OSError as error:
        raise CheckpointError(f"could not write in {path}: {error}; resume from the last checkpoint") from error


def refuse_earlier_run(path: Path, train: TrainConfig) -> None:
    """Raise ConfigError if the directory holds a run that is neither resumed nor overwritten."""
    if (path / METRICS).exists() and train.resume_from_checkpoint is None and not train.overwrite_output_dir:
        raise ConfigError(
            f"train.output_dir {path} holds an earlier run; choose another, resume it with "
            "train.resume_from_checkpoint=auto, or delete it with train.overwrite_output_dir=true"
        )
