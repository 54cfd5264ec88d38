"""Writes checkpoints in the background while training continues.

    main thread        snapshot ─ step … step ──────── step … step ──────────── step
    its own thread              └► write the files ─┐  └► digests, flush, rename ─┐
                                                    └ all ranks have written       └ `done`: older ones are deleted

Ranks communicate only in the main thread, after a step, if all their threads are done.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rl_vlm.checkpoint import store
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.signals import stop, wait_for
from rl_vlm.errors import CheckpointError


@runtime_checkable
class Files(Protocol):
    """A rank's share of a checkpoint's files. It holds copies of everything that training changes."""

    @property
    def num_bytes(self) -> int: ...

    def write(self, directory: Path) -> None:
        """Write the files to a directory, without communication."""
        ...


@dataclass(frozen=True)
class CheckpointFiles:
    """A rank's share of all files."""

    parts: Sequence[tuple[str, Files]]
    """Files, each with its target folder in the checkpoint."""
    states: Mapping[str, bytes]
    """Contents of further files, by name. Only the main process has any."""

    @property
    def num_bytes(self) -> int:
        return sum(files.num_bytes for _, files in self.parts) + sum(map(len, self.states.values()))

    def write(self, directory: Path) -> None:
        for folder, files in self.parts:
            files.write(directory / folder)
        for name, content in self.states.items():
            (directory / name).write_bytes(content)


@dataclass
class Pending:
    """A checkpoint that is being written."""

    step: int
    work: Future[Any]
    """The work of this rank's thread."""
    done: Callable[[], None]
    are_files_written: bool = False
    """Whether all ranks have written their files, so that the main process is finishing the checkpoint."""


class CheckpointWriter:
    """Writes one checkpoint at a time. All ranks must call each method together.

    If a checkpoint cannot be written, the method that notices it raises CheckpointError on every rank. Earlier
    checkpoints do not change.
    """

    def __init__(self, output_dir: Path, ranks: Ranks, in_background: bool = True) -> None:
        """Without `in_background`, `write` waits until the checkpoint is complete."""
        self.output_dir = output_dir
        self.ranks = ranks
        self.in_background = in_background
        self.pending: Pending | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.seconds = 0.0

    def write(self, step: int, snapshot: Callable[[], Files], done: Callable[[], None]) -> None:
        """Finish the previous checkpoint and begin to write this one, unless the step has a complete checkpoint.

        All ranks call `done()` together once the checkpoint is complete.
        """
        self.finish()
        with self.timed():
            (exists,) = self.ranks.gather([self.is_complete(step)] if self.ranks.is_main else [])
            if exists:
                return
            files = snapshot()
            needed = int(self.ranks.sum([float(files.num_bytes)])[0])
            unfinished = store.unfinished_path(self.output_dir, step)
            with self.discarded_on_failure(step):
                if self.ranks.is_main:
                    store.check_space(self.output_dir, needed)
                    store.begin(unfinished)
            self.pending = Pending(step, self.thread.submit(files.write, unfinished), done)
        if not self.in_background:
            self.finish()

    def continue_if_ready(self) -> None:
        """Advance the checkpoint that is being written if the threads of all ranks are done. Never wait for them."""
        with self.timed():
            if self.pending and not self.ranks.max([int(not self.pending.work.done())])[0]:
                self.advance(self.pending)

    def finish(self) -> None:
        """Wait until no checkpoint is being written."""
        with self.timed():
            while self.pending:
                self.advance(self.pending)

    def advance(self, pending: Pending) -> None:
        """Wait for all threads. Then make the main process finish the checkpoint, or call `done` if it has."""
        self.pending = None
        with self.discarded_on_failure(pending.step), stop.postponed():
            wait_for(pending.work)
        if pending.are_files_written:
            pending.done()
            return
        unfinished = store.unfinished_path(self.output_dir, pending.step)
        written = self.ranks.gather(store.file_names(unfinished))
        work = self.thread.submit(store.commit, unfinished, written) if self.ranks.is_main else nothing_to_do()
        self.pending = Pending(pending.step, work, pending.done, are_files_written=True)

    @contextmanager
    def discarded_on_failure(self, step: int) -> Iterator[None]:
        """Run a block on all ranks. If it fails on one, delete the unfinished checkpoint and raise CheckpointError."""
        try:
            with self.ranks.agree(), store.named_errors(self.output_dir, step):
                yield
        except CheckpointError:
            if self.ranks.is_main:
                shutil.rmtree(store.unfinished_path(self.output_dir, step), ignore_errors=True)
            raise

    def is_complete(self, step: int) -> bool:
        return store.is_complete(store.checkpoint_path(self.output_dir, step))

    def take_seconds(self) -> float:
        """Return the seconds that the main thread has spent in these methods since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    @contextmanager
    def timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def close(self) -> None:
        """Wait for this rank's thread. A run of one process finishes its checkpoint, others leave it unfinished."""
        try:
            if self.ranks.world_size == 1:
                self.finish()
        finally:
            self.thread.shutdown()


def nothing_to_do() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done
