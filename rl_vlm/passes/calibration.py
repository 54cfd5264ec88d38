"""Calibration of `micro_batch_tokens: auto` on a GPU: the plan's budget is corrected once, by measured peaks.

first steps ─ peaks of micro-batches ─► bytes per token of the large ones, maximum over ranks ─► fitting budget

The plan's memory limit does not depend on how much memory is free. Checkpoints hold the measurements, and the change is
recorded like any other, so that a resumed run replays it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_vlm.passes.peaks import Peaks
from rl_vlm.passes.schedule import Round
from rl_vlm.stages import Listener, Stage
from rl_vlm.types import MicroBatch

MEASURED_STEPS = 3
"""Optimizer steps before the budget is corrected. The first one has no optimizer state yet."""


@dataclass
class MeasuredPeaks:
    """Bytes held in the first steps' large micro-batches, maximum over ranks."""

    steps: int = 0
    """Optimizer steps so far."""
    held: int = 0
    """Bytes before a micro-batch: weights, gradients, and from the second step on the optimizer state."""
    bytes_per_token: float = 0.0
    """0 if no micro-batch was large enough."""
    is_used: bool = False
    """Whether the budget was corrected by these figures."""

    def add(self, figures: Iterable[tuple[int, float]]) -> None:
        """Add a step's micro-batches: the bytes held before each, and its bytes per token."""
        for held, bytes_per_token in figures:
            self.held = max(self.held, held)
            self.bytes_per_token = max(self.bytes_per_token, bytes_per_token)
        self.steps += 1

    def mark_used(self) -> None:
        """Note that the budget is corrected. It is not corrected again."""
        self.is_used = True


class MicroBatchPeak(NamedTuple):
    """Bytes held before a micro-batch's forward and backward, and the peak during them."""

    batch: MicroBatch
    before: int
    peak: int


class MicroBatchPeaks(Listener):
    """Measures the micro-batches of training passes, between `start` and `take`.

    A step's first micro-batch is not measured, because no gradients are held before its backward.
    """

    def __init__(self, peaks: Peaks, of_engine: int) -> None:
        """`of_engine` are the bytes of the rollout engine. `peaks` counts them, and they are subtracted here."""
        self.peaks = peaks
        self.of_engine = of_engine
        self.is_measuring = False
        self.found: list[MicroBatchPeak] = []
        self.num_rounds = 0

    def start(self) -> None:
        """Measure the passes from now on."""
        self.is_measuring = True

    def take(self) -> list[MicroBatchPeak]:
        """Return the measurements of the passes' last attempt, and stop measuring."""
        found, self.found, self.is_measuring = self.found, [], False
        return found

    def passes(self, stage: Stage) -> AbstractContextManager[Any]:
        self.found, self.num_rounds = [], 0
        return nullcontext()

    def work(self, work: Round) -> AbstractContextManager[Any]:
        return self.measured(work.forward.batch) if self.is_measuring else nullcontext()

    @contextmanager
    def measured(self, batch: MicroBatch) -> Iterator[None]:
        """Measure a micro-batch."""
        self.num_rounds += 1
        is_first = self.num_rounds == 1
        with self.peaks.block() as block:
            yield
        if not is_first:
            self.found.append(MicroBatchPeak(batch, block.before - self.of_engine, block.peak - self.of_engine))
