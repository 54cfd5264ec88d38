"""Draws rows and builds their prompts. Worker processes build prompts in advance.

    this process   train on window 0     train on window 1     train on window 2
    workers        build window 1        build window 2        build window 3

Workers follow a copy of the sampler. The sampler itself does not move ahead. So a checkpoint holds the same position,
and a resumed run draws the same rows, with any number of workers.

`torch.utils.data.DataLoader` is not used. If it is closed while prompts are being built, it takes seconds and leaks
their shared memory. If a worker dies, it raises an error from a signal handler, at any point of training.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, multiprocessing

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.prompts import SampleRenderer, build_prompt
from rl_vlm.data.sampler import Draw, PromptSampler
from rl_vlm.data.samples import Rows
from rl_vlm.distributed.signals import stop, wait_for
from rl_vlm.errors import ConfigError, TrainingError
from rl_vlm.types import Prompt

PromptCheck = Callable[[Mapping[str, Prompt]], None]
"""Raises DataError for prompts that cannot be used. Gets prompts by the names of their rows."""


@dataclass(frozen=True)
class PromptSource:
    """Builds the prompts of drawn rows."""

    rows: Rows
    row_indices: list[int]
    """Indices of the dataset's rows in use. The sampler counts in this order."""
    builder: SampleRenderer

    def build(self, draw: Draw) -> Prompt:
        """Build the prompt of a draw. Raises DataError with the row's name if the row cannot be used."""
        return build_prompt(self.rows, self.row_indices[draw.row], self.builder)

    def place(self, draw: Draw) -> str:
        """Return the name of a draw's row for error messages."""
        return self.rows.place(self.row_indices[draw.row])


class PromptLoader:
    """Draws rows and builds their prompts: in advance in worker processes, or on request without workers."""

    def __init__(
        self,
        source: PromptSource,
        sampler: PromptSampler,
        steps_per_window: int,
        data: DataConfig,
        check: PromptCheck = lambda prompts: None,
    ) -> None:
        """Workers start with the first window. `check` gets the prompts of each window, by the names of their rows.

        Raises ConfigError if the rows or the processor cannot be sent to workers.
        """
        self.source = source
        self.check = check
        self.sampler = sampler
        self.steps_per_window = steps_per_window
        self.num_workers = data.dataloader_num_workers
        self.num_ahead = self.num_workers * (data.dataloader_prefetch_factor or 1)
        self.pickled_source = pickle_source(source) if self.num_workers else None
        self.workers: ProcessPoolExecutor | None = None
        self.ahead: deque[tuple[list[Draw], list[Future[Prompt]]]] = deque()

    @property
    def epoch(self) -> float:
        """Return the number of passes over the data so far."""
        return self.sampler.epoch

    @property
    def window_size(self) -> int:
        """Return the number of prompts of one generation window on this rank."""
        return self.sampler.share * self.steps_per_window

    def draw_window(self) -> list[Draw]:
        """Draw this rank's rows of the next generation window."""
        return self.sampler.next_window(self.steps_per_window)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. Raises CheckpointError if the order of rows has changed."""
        self.sampler.load_state_dict(state)

    def prompts(self, draws: Sequence[Draw]) -> list[Prompt]:
        """Return the prompts of the sampler's latest draws.

        Raises DataError if a row cannot be used, and TrainingError if a worker process died.
        """
        prompts = self.built(draws)
        self.check({self.source.place(draw): prompt for draw, prompt in zip(draws, prompts, strict=True)})
        return prompts

    def built(self, draws: Sequence[Draw]) -> list[Prompt]:
        """Return the prompts from the workers.

        If the workers are not at this window, as at the start, build it here while they begin with the next one.
        """
        if not self.num_workers:
            return [self.source.build(draw) for draw in stop.checked(draws)]
        try:
            if self.ahead and self.ahead[0][0] == list(draws):
                _, window = self.ahead.popleft()
                self.send_ahead()
                return [wait_for(prompt) for prompt in window]
            self.start()
            self.send_ahead()
            return [self.source.build(draw) for draw in stop.checked(draws)]
        except BrokenExecutor as error:
            self.close()
            raise TrainingError(
                f"A process that prepares data died: {error} The system may have run out of memory and killed it, or "
                "/dev/shm may be full. Lower data.dataloader_num_workers, or set it to 0 to prepare data in the main "
                "process."
            ) from error

    def start(self) -> None:
        """Start new workers on the windows that follow the sampler's position."""
        self.close()
        assert self.pickled_source is not None
        # Workers are new interpreters, since a fork of a process with threads or CUDA can hang.
        spawn = multiprocessing.get_context("spawn")
        self.workers = ProcessPoolExecutor(self.num_workers, spawn, start_worker, (self.pickled_source,))
        self.coming = upcoming_windows(self.sampler, self.steps_per_window)

    def send_ahead(self) -> None:
        """Send the workers rows until `num_ahead` windows are in progress."""
        assert self.workers is not None
        while len(self.ahead) < self.num_ahead:
            draws = next(self.coming)
            self.ahead.append((draws, [self.workers.submit(build_in_worker, draw) for draw in draws]))

    def close(self) -> None:
        """End the workers, each after its current row."""
        if self.workers is not None:
            self.workers.shutdown(cancel_futures=True)
        self.workers = None
        self.ahead.clear()


def upcoming_windows(sampler: PromptSampler, steps: int) -> Iterator[list[Draw]]:
    """Yield the windows that the sampler will draw. The sampler itself does not move."""
    ahead = copy.copy(sampler)
    while True:
        yield ahead.next_window(steps)


def pickle_source(source: PromptSource) -> Tensor:
    """Pickle the source into shared memory. If it went through pipes, workers would have to start one after the other.

    Raises ConfigError if it cannot be pickled.
    """
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
    """Set up this process as a worker: one thread, no GPU, and it ends with the main process."""
    global worker_source
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    multiprocessing.set_sharing_strategy("file_system")  # "file_descriptor" uses a file descriptor per tensor
    keep_descriptors_here()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted main process ends its workers itself
    threading.Thread(target=end_with_parent, daemon=True).start()
    worker_source = pickle.loads(pickled_source.numpy().data)


def keep_descriptors_here() -> None:
    """Stop programs that are started here from inheriting file descriptors.

    torch's shared memory manager outlives a killed worker. It would keep the worker's pipe open, and the main process
    would not notice that the worker is gone.
    """
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            os.set_inheritable(int(name), name in "012")


def end_with_parent() -> None:
    """End this process when the main process ends. If it is killed, it cannot end its workers itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def build_in_worker(draw: Draw) -> Prompt:
    """Build the prompt of a draw from the worker's own source, and hash its images and videos here."""
    prompt = worker_source.build(draw)
    _ = prompt.digest, prompt.sample.reads  # pickled with the prompt
    return prompt
