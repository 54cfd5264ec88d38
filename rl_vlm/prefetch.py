"""Prompts ahead of need: worker processes read, decode, resize and tokenize the rows that the sampler draws next.

    this process   train on window 0     train on window 1     train on window 2
    workers        build window 1        build window 2        build window 3

The sampler does not move: what is built ahead follows a copy of it, so a checkpoint holds the same cursor, and a
resumed run draws the same rows, with any number of workers.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, multiprocessing

from rl_vlm.config.schema import DataConfig
from rl_vlm.data import Rows
from rl_vlm.errors import ConfigError, TrainingError
from rl_vlm.prompts import PromptBuilder
from rl_vlm.sampler import Draw, PromptSampler
from rl_vlm.types import Prompt


@dataclass(frozen=True)
class PromptSource:
    """What it takes to make a drawn row's prompt."""

    rows: Rows
    row_indices: list[int]
    """The dataset's rows that are in use, in the order that the sampler counts."""
    builder: PromptBuilder

    def build(self, draw: Draw) -> Prompt:
        """Raises DataError, naming the row, if it cannot be used."""
        return self.builder.build(self.rows.sample(self.row_indices[draw.row]))


class Prefetcher:
    """Builds the prompts of coming windows while this one is trained on; without workers, when they are asked for."""

    def __init__(self, source: PromptSource, sampler: PromptSampler, steps_per_window: int, data: DataConfig) -> None:
        """Workers start with the first window. Raises ConfigError if the rows or the processor cannot be sent there."""
        self.source = source
        self.sampler = sampler
        self.steps_per_window = steps_per_window
        self.num_workers = data.dataloader_num_workers
        self.num_ahead = self.num_workers * (data.dataloader_prefetch_factor or 1)
        self.pickled_source = pickle_source(source) if self.num_workers else None
        self.workers: ProcessPoolExecutor | None = None
        self.ahead: deque[tuple[list[Draw], list[Future[Prompt]]]] = deque()

    def prompts(self, draws: list[Draw]) -> list[Prompt]:
        """The prompts of the draws that the sampler has just made.

        A window that is not on its way, such as the first, is built here, while workers begin with those behind it.
        Raises DataError, as `PromptSource.build` does, and TrainingError if a worker process died.
        """
        if not self.num_workers:
            return [self.source.build(draw) for draw in draws]
        try:
            if self.ahead and self.ahead[0][0] == draws:
                _, window = self.ahead.popleft()
                self.send_ahead()
                return [prompt.result() for prompt in window]
            self.start()
            self.send_ahead()
            return [self.source.build(draw) for draw in draws]
        except BrokenExecutor as error:
            self.close()
            raise TrainingError(
                f"A process that prepares data died: {error} The system may have killed it for want of memory, or "
                "/dev/shm may be full. Lower data.dataloader_num_workers, or set it to 0 to prepare data in the main "
                "process."
            ) from error

    def start(self) -> None:
        """Begin where the sampler stands, with new workers."""
        self.close()
        assert self.pickled_source is not None
        # A forked copy of a process that has threads or CUDA can hang, so workers are new interpreters.
        spawn = multiprocessing.get_context("spawn")
        self.workers = ProcessPoolExecutor(self.num_workers, spawn, start_worker, (self.pickled_source,))
        self.coming = upcoming_windows(self.sampler, self.steps_per_window)

    def send_ahead(self) -> None:
        """Give the workers the rows of windows that are not on their way yet."""
        assert self.workers is not None
        while len(self.ahead) < self.num_ahead:
            draws = next(self.coming)
            self.ahead.append((draws, [self.workers.submit(build_in_worker, draw) for draw in draws]))

    def close(self) -> None:
        """End the workers, each after the row that it is at."""
        if self.workers is not None:
            self.workers.shutdown(cancel_futures=True)
        self.workers = None
        self.ahead.clear()


def upcoming_windows(sampler: PromptSampler, steps: int) -> Iterator[list[Draw]]:
    """The windows that the sampler will draw, which it does not notice."""
    ahead = copy.copy(sampler)
    while True:
        yield ahead.next_window(steps)


def pickle_source(source: PromptSource) -> Tensor:
    """The source as bytes in shared memory: through its pipe, each worker's start would wait for the one before."""
    try:
        return torch.frombuffer(bytearray(pickle.dumps(source)), dtype=torch.uint8).share_memory_()
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"data.dataloader_num_workers: the rows or the processor cannot be sent to worker processes: {error}. "
            "Set it to 0 to prepare data in the main process."
        ) from error


# In a worker

worker_source: PromptSource


def start_worker(pickled_source: Tensor) -> None:
    """Make this process a worker: one thread, no GPU, no life of its own."""
    global worker_source
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    multiprocessing.set_sharing_strategy("file_system")  # the other one takes a file descriptor for every tensor
    keep_descriptors_here()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted main process ends its workers itself
    threading.Thread(target=end_with_parent, daemon=True).start()
    worker_source = pickle.loads(pickled_source.numpy().data)


def keep_descriptors_here() -> None:
    """Programs started here inherit none: torch's shared memory manager outlives a killed worker, and would hold open
    the pipe whose end tells the main process of it.
    """
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            os.set_inheritable(int(name), name in "012")


def end_with_parent() -> None:
    """A main process that was killed cannot end its workers, and they would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def build_in_worker(draw: Draw) -> Prompt:
    return worker_source.build(draw)
