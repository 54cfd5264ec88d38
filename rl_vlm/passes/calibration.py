"""Calibration of `micro_batch_tokens: auto` on a GPU: the plan's budget is corrected once, by measured peaks.

first steps ─ peaks of their large micro-batches ─► bytes per token, at most of all ranks ─► the budget that fits

The memory that the plan offers does not depend on the memory that is free. What was measured is in the checkpoint, and
the change is recorded as any other, so that a resumed run replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.passes.budget import Budget
from rl_vlm.passes.micro_batches import VisionTokens, batch_tokens
from rl_vlm.passes.peaks import Peak
from rl_vlm.passes.recovery import Recovery
from rl_vlm.stages import NO_ONE, Stage, Stages
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


class CalibratedRecovery(Recovery):
    """Recovery of a run whose budget is from the memory plan, and is corrected after its first steps."""

    def __init__(
        self,
        ranks: Ranks,
        budget: Budget,
        vision_tokens: VisionTokens,
        planned: PlannedTraining,
        peak: Peak,
        of_engine: int,
        stages: Stages = NO_ONE,
    ) -> None:
        """`of_engine` are the bytes of the rollout engine, which `peak` counts as well."""
        super().__init__(ranks, budget, vision_tokens, str(planned), stages)
        self.planned = planned
        self.peak = peak
        self.of_engine = of_engine
        self.before_restart: Callable[[], object] = lambda: None
        """Called before the peak is restarted, for others who read it."""
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
        self.before_restart()
        self.peak.restart()
        self.num_batches += 1
        held, tokens = self.peak.read(), batch_tokens(batch, self.vision_tokens)
        with super().watch(batch):
            yield
        if self.num_batches > 1 and tokens >= self.budget.tokens / 2:
            per_token = (self.peak.read() - held - self.planned.fixed) / tokens
            self.found.append((held - self.of_engine, per_token))

    def repeat(self, stage: Stage, passes: Callable[[], T], undo: Callable[[], None], together: bool) -> T:
        """Run passes as `Recovery.repeat` does. The first steps are measured, and the next one corrects the budget."""
        measured = self.budget.progress.measured
        if stage is not Stage.TRAINING or measured.is_used or self.budget.replays_calibration:
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
        self.budget.change(tokens, Stage.TRAINING, "calibration", message, self.ranks.is_main)

    def fitting_tokens(self) -> int:
        """Return the largest budget that fits. It stays if nothing was measured, and does not rise again if a pass ran
        out of memory.
        """
        measured, planned, present = self.budget.progress.measured, self.planned, self.budget.tokens
        if measured.bytes_per_token <= 0:
            return present
        fitting = int((planned.available - measured.held - planned.fixed) / measured.bytes_per_token)
        return max(1, min(fitting, present if present < planned.tokens else planned.most_tokens))
