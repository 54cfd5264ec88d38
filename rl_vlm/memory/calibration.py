"""Calibration of `micro_batch_tokens: auto` on a GPU: the plan's budget is corrected once, by measured peaks.

first steps ─ peaks of their large micro-batches ─► bytes per token, at most of all ranks ─► the budget that fits

The memory that the plan offers does not depend on the memory that is free. What was measured is in the checkpoint, and
the change is recorded as any other, so that a resumed run replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.memory.budget import Budget
from rl_vlm.memory.micro_batches import VisionTokens, batch_tokens
from rl_vlm.memory.recovery import Recovery
from rl_vlm.types import MicroBatch

T = TypeVar("T")

MEASURED_STEPS = 3
"""Optimizer steps before the budget is corrected. The first one has no optimizer state yet."""
GIB = 2**30


@dataclass(frozen=True)
class PlannedTraining:
    """What the memory plan says of forward and backward passes, in bytes."""

    available: int
    """What weights, gradients, optimizer state and activations may take together."""
    fixed: float
    """What a pass holds whatever its size, beside weights and gradients."""
    peak: int
    tokens: int
    """The budget that the run starts with."""
    most_tokens: int
    """The largest budget that `auto` chooses."""

    def __str__(self) -> str:
        return (
            f"the memory plan has {self.peak / GIB:.2f} GiB for {self.tokens} tokens, of {self.available / GIB:.2f} "
            "GiB available"
        )


@runtime_checkable
class DeviceMemory(Protocol):
    """Counter of the bytes of tensors on a device."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int: ...

    def held(self) -> int: ...


class CudaMemory:
    """Bytes that torch has allocated on the current GPU, without those of the rollout engine."""

    def __init__(self, of_engine: int) -> None:
        self.of_engine = of_engine

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self.of_engine

    def held(self) -> int:
        return allocated_bytes() - self.of_engine


def allocated_bytes() -> int:
    """Return the bytes of tensors on the current GPU; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


class CalibratedRecovery(Recovery):
    """Recovery of a run whose budget is from the memory plan, and is corrected after its first steps."""

    def __init__(
        self,
        ranks: Ranks,
        budget: Budget,
        vision_tokens: VisionTokens,
        planned: PlannedTraining,
        memory: DeviceMemory,
    ) -> None:
        super().__init__(ranks, budget, vision_tokens, str(planned))
        self.planned = planned
        self.memory = memory
        self.before_reset: Callable[[], object] = lambda: None
        """Called before the peak is reset, for others who read it."""
        self.is_measuring = False
        self.num_batches = 0
        """Micro-batches of the passes so far."""
        self.found: list[tuple[int, float]] = []
        """Bytes that were held beside a micro-batch of these passes, and its bytes per token."""

    @contextmanager
    def watch(self, batch: MicroBatch) -> Iterator[None]:
        """Run a micro-batch as `Recovery.watch` does, and measure it if it is large.

        The first one of a step has no gradients beside it before its backward, and is not measured.
        """
        if not self.is_measuring:
            with super().watch(batch):
                yield
            return
        self.before_reset()
        self.memory.reset_peak()
        self.num_batches += 1
        held, tokens = self.memory.held(), batch_tokens(batch, self.vision_tokens)
        with super().watch(batch):
            yield
        if self.num_batches > 1 and tokens >= self.budget.tokens / 2:
            self.found.append((held, (self.memory.peak() - held - self.planned.fixed) / tokens))

    def repeat(self, stage: str, passes: Callable[[], T], undo: Callable[[], None], together: bool) -> T:
        """Run passes as `Recovery.repeat` does. The first steps are measured, and the next one corrects the budget."""
        measured = self.budget.progress.measured
        if stage != "training" or measured.is_used or self.budget.replays_calibration:
            return super().repeat(stage, passes, undo, together)
        if measured.steps == MEASURED_STEPS:
            self.calibrate()
            return super().repeat(stage, passes, undo, together)

        def measured_passes() -> T:
            self.num_batches, self.found = 0, []
            return passes()

        self.is_measuring = True
        result = super().repeat(stage, measured_passes, undo, together)
        self.is_measuring = False
        for held, bytes_per_token in (pair for pairs in self.ranks.gather([self.found]) for pair in pairs):
            measured.held = max(measured.held, held)
            measured.bytes_per_token = max(measured.bytes_per_token, bytes_per_token)
        measured.steps += 1
        return result

    def calibrate(self) -> None:
        """Set the largest budget that fits by the measured bytes per token, and record it."""
        measured, step = self.budget.progress.measured, self.budget.progress.global_step + 1
        tokens = self.fitting_tokens()
        message = (
            f"step {step}: micro_batch_tokens is {tokens} from now on, {self.budget.tokens} so far. The first steps "
            f"held {measured.held / GIB:.2f} GiB and {measured.bytes_per_token / 2**20:.3f} MiB per token; "
            f"{self.planned}"
        )
        self.budget.change(tokens, "training", "calibration", message, self.ranks.is_main)

    def fitting_tokens(self) -> int:
        """Return the largest budget that fits. It stays if nothing was measured, and does not rise again if a pass ran
        out of memory.
        """
        measured, planned, present = self.budget.progress.measured, self.planned, self.budget.tokens
        if measured.bytes_per_token <= 0:
            return present
        fitting = int((planned.available - measured.held - planned.fixed) / measured.bytes_per_token)
        return max(1, min(fitting, present if present < planned.tokens else planned.most_tokens))
