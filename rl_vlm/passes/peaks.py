"""Memory peaks: the most bytes that this process holds within a block, by the device's own counter.

with peaks.block() as outer:            outer.peak counts the inner block as well,
    with peaks.block() as inner:        unless that is `apart`
"""

from __future__ import annotations

import ctypes
import resource
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from rl_vlm.errors import ConfigError
from rl_vlm.stages import Listener, Stage

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


@runtime_checkable
class PeakCounter(Protocol):
    """A counter of the largest number of bytes."""

    meaning: str
    """Description of the counted bytes."""

    def restart(self) -> None:
        """Restart the peak at the bytes held now."""
        ...

    def read(self) -> int:
        """Return the most bytes since `restart`."""
        ...


class CudaPeak:
    """Tensors on a GPU."""

    meaning = "tensors on the GPU, by PyTorch's allocator"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


class ResidentPeak:
    """The process's resident memory. The kernel counts its peak, so nothing is missed."""

    meaning = "growth of the process's resident memory"

    def __init__(self) -> None:
        """Raise ConfigError if the system does not count this peak."""
        if not CLEAR_REFS.exists():
            raise ConfigError(f"log.memory_profile: on a CPU it needs Linux, which counts memory in {CLEAR_REFS}")

    def restart(self) -> None:
        """Return freed memory to the system, since it would count as resident, and restart the peak."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)
        CLEAR_REFS.write_text(RESET_PEAK)

    def read(self) -> int:
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return 1024 * int(fields["VmHWM"].split()[0])


def counter_of(device: torch.device) -> PeakCounter:
    """Return the counter for a rank's device."""
    return CudaPeak(device) if device.type == "cuda" else ResidentPeak()


@dataclass
class Block:
    """Bytes held before a block of code, at its peak, and after it."""

    before: int
    peak: int
    after: int = 0


class Peaks:
    """Peaks of nested blocks. All measurements of a device share one instance, since its counter has one peak."""

    def __init__(self, counter: PeakCounter) -> None:
        self.counter = counter
        self.open: list[list[Block]] = [[]]
        """Lists of open blocks. Only the last list counts the bytes held now. A block `apart` opens a new list."""

    @contextmanager
    def block(self, apart: bool = False) -> Iterator[Block]:
        """Measure a block. If it is `apart`, the blocks around it do not count its bytes."""
        self.note()
        held = self.counter.read()
        block = Block(held, held)
        if apart:
            self.open.append([])
        self.open[-1].append(block)
        try:
            yield block
        finally:
            self.note()
            block.after = self.counter.read()
            self.open[-1].pop()
            if apart:
                self.open.pop()

    def note(self) -> None:
        """Note the peak of the open blocks until now, and restart the counter."""
        most = self.counter.read()
        for block in self.open[-1]:
            block.peak = max(block.peak, most)
        self.counter.restart()


class StagePeaks(Listener):
    """Measures each stage without the stages nested in it.

    In training, only the passes are measured: the first update creates the optimizer state, which does not belong to
    them.
    """

    def __init__(self, peaks: Peaks, stages: Container[Stage] = Stage, num_blocks: int | None = None) -> None:
        """Measure the first `num_blocks` blocks of each of these stages, or all blocks.

        Other blocks count as part of the stages around them.
        """
        self.peaks = peaks
        self.stages = stages
        self.num_blocks = num_blocks
        self.num_measured: Counter[Stage] = Counter()
        self.largest: dict[Stage, Block] = {}
        """The block with the highest peak, by stage."""

    def stage(self, stage: Stage) -> AbstractContextManager[Any]:
        return nullcontext() if stage is Stage.TRAINING else self.measured(stage)

    def passes(self, stage: Stage) -> AbstractContextManager[Any]:
        return self.measured(stage) if stage is Stage.TRAINING else nullcontext()

    def measured(self, stage: Stage) -> AbstractContextManager[Any]:
        """Measure a block if its stage is selected and it is among the stage's first blocks."""
        is_measured = stage in self.stages and self.num_measured[stage] != self.num_blocks
        return self.noted(stage) if is_measured else nullcontext()

    @contextmanager
    def noted(self, stage: Stage) -> Iterator[None]:
        """Measure a block of a stage."""
        with self.peaks.block(apart=True) as block:
            yield
        self.num_measured[stage] += 1
        self.largest[stage] = max(self.largest.get(stage, block), block, key=lambda each: each.peak)

    def take(self) -> dict[Stage, Block]:
        """Return the largest blocks since the last call."""
        taken, self.largest = self.largest, {}
        return taken


def held_gib() -> float:
    """Return the GiB that this process holds: PyTorch's reserve on a GPU, else its largest resident memory so far."""
    if torch.cuda.is_available():
        return torch.cuda.memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def allocated_bytes() -> int:
    """Return the bytes of tensors on the current GPU; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
