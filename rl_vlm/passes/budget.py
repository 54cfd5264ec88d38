"""The token budget of micro-batches: the price of a prompt, and changes after measured peaks or lack of memory.

    memory plan ─► budget ─ a pass runs out of memory (recovery.py) ─► lowered to half of the failed micro-batch ─┐
                          ─ peaks of the first steps (calibration.py) ─► corrected once, on a GPU ────────────────┤
                                              recorded (changes.py), and replayed by a resumed run ◄──────────────┘

The budget counts the language model's tokens, with padding. If the vision tower is trained, image patches count too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rl_vlm.distributed.collectives import Collectives
from rl_vlm.model.vision import VisionEncoder, num_patches, patch_cost
from rl_vlm.passes.calibration import MEASURED_STEPS, MeasuredPeaks, MicroBatchPeak, MicroBatchPeaks
from rl_vlm.passes.changes import BudgetChange, BudgetReason, BudgetSetting
from rl_vlm.passes.micro_batches import batch_tokens
from rl_vlm.stages import Stage
from rl_vlm.types import MicroBatch, Progress, Rendered

logger = logging.getLogger(__name__)

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class PlannedBudget:
    """The budget that a run starts with, and its memory plan's figures for forward and backward passes, in bytes."""

    tokens: int
    patch_price: float = 0.0
    """Language tokens that take as much memory as one image patch; 0 if no plan was made for the budget."""
    available: int | None = None
    """Bytes for weights, gradients, optimizer state and activations together; None if no plan was made."""
    fixed: float = 0.0
    """Bytes of a pass that do not depend on its size, without weights and gradients."""
    peak: int = 0
    most_tokens: int = 0
    """The largest budget that `auto` chooses."""

    def __str__(self) -> str:
        if self.available is None:
            return "no memory plan was made"
        return (
            f"the memory plan has {self.peak / GIB:.2f} GiB for {self.tokens} tokens, of {self.available / GIB:.2f} "
            "GiB available"
        )


class TokenBudget:
    """The budget in force, on one rank. All ranks change it together."""

    def __init__(
        self,
        ranks: Collectives,
        progress: Progress,
        vision: VisionEncoder,
        planned: PlannedBudget,
        setting: BudgetSetting = "auto",
        record: Callable[[BudgetChange], None] = lambda change: None,
    ) -> None:
        """`record` records a change in the run directory."""
        self.ranks = ranks
        self.progress = progress
        self.vision = vision
        self.planned = planned
        self.setting: BudgetSetting = setting
        self.record = record
        self.peaks: MicroBatchPeaks | None = None
        """Peaks of the first steps, which correct the budget. If None, the budget stays as planned."""
        self.tokens = planned.tokens
        self.patch_price = planned.patch_price
        self.measured = MeasuredPeaks()
        self.to_replay: Sequence[BudgetChange] = ()
        """Recorded changes after the checkpoint that the run resumes from."""
        self.has_run_out = False
        """Whether this process has lowered the budget itself. Replayed changes do not count."""

    def price(self, rendered: Rendered) -> int:
        """Return the cost of images in a micro-batch, in language tokens; 0 if the tower is frozen."""
        if self.vision.is_frozen:
            return 0
        price = self.patch_price or self.patch_cost
        return math.ceil(price * num_patches(self.vision.model.config, rendered)) if rendered.mm_inputs else 0

    @cached_property
    def patch_cost(self) -> float:
        """Return the cost of a patch as the model's config gives it."""
        return patch_cost(self.vision.model.config)

    def tokens_of(self, batch: MicroBatch) -> int:
        """Return the tokens of a micro-batch."""
        return batch_tokens(batch, self.price)

    def replay(self, changes: Sequence[BudgetChange]) -> None:
        """Store the first run's changes, which the resumed run repeats at the same steps."""
        self.to_replay = changes

    def correct_by(self, peaks: MicroBatchPeaks) -> None:
        """Let these peaks of the first steps correct the budget, once."""
        self.peaks = peaks

    def before(self, stage: Stage) -> int:
        """Change the budget before a stage's passes if that is due or recorded. Return how many failures are replayed.

        If this run has lowered the budget itself, replayed changes do not raise it.
        """
        if stage is Stage.TRAINING and self.peaks and self.is_to_be_corrected:
            if self.measured.steps == MEASURED_STEPS:
                self.correct()
            else:
                self.peaks.start()
        found = [c for c in self.to_replay if (c.step, c.stage) == (self.progress.global_step + 1, stage)]
        for change in found:
            lowers = change.reason == "out_of_memory" or self.has_run_out
            self.tokens = min(change.micro_batch_tokens, self.tokens) if lowers else change.micro_batch_tokens
            if change.reason == "calibration":
                self.measured.mark_used()
        return sum(change.reason == "out_of_memory" for change in found)

    def after(self) -> None:
        """Collect the peaks of the passes since `before`, from all ranks."""
        if self.peaks is None or not self.peaks.is_measuring:
            return
        found = [self.figures(peak) for peak in self.peaks.take() if self.tokens_of(peak.batch) >= self.tokens / 2]
        self.measured.add(pair for pairs in self.ranks.gather([found]) for pair in pairs)

    def figures(self, peak: MicroBatchPeak) -> tuple[int, float]:
        """Return the bytes held before a micro-batch, and the bytes that it takes per token."""
        return peak.before, (peak.peak - peak.before - self.planned.fixed) / self.tokens_of(peak.batch)

    def lower(self, stage: Stage, tokens: int, message: str, is_writer: bool) -> None:
        """Set a smaller budget from this stage on, after a micro-batch ran out of memory. `message` says why."""
        self.has_run_out = True
        self.change(tokens, stage, "out_of_memory", message, is_writer)

    @property
    def is_to_be_corrected(self) -> bool:
        """Return whether the budget was not corrected yet, and no replayed change will correct it."""
        return not self.measured.is_used and all(change.reason != "calibration" for change in self.to_replay)

    def correct(self) -> None:
        """Set the largest budget that fits by the measured bytes per token."""
        measured, step, tokens = self.measured, self.progress.global_step + 1, self.fitting_tokens()
        measured.mark_used()
        message = (
            f"step {step}: micro_batch_tokens is {tokens} from now on, {self.tokens} so far. The first steps held "
            f"{measured.held / GIB:.2f} GiB and {measured.bytes_per_token / MIB:.3f} MiB per token; {self.planned}"
        )
        self.change(tokens, Stage.TRAINING, "calibration", message, self.ranks.is_main)

    def fitting_tokens(self) -> int:
        """Return the largest budget that fits.

        Return the present budget if nothing was measured. Return no larger one if a pass ran out of memory before.
        """
        measured, planned = self.measured, self.planned
        if measured.bytes_per_token <= 0 or planned.available is None:
            return self.tokens
        fitting = int((planned.available - measured.held - planned.fixed) / measured.bytes_per_token)
        return max(1, min(fitting, self.tokens if self.tokens < planned.tokens else planned.most_tokens))

    def change(self, tokens: int, stage: Stage, reason: BudgetReason, message: str, is_writer: bool) -> None:
        """Set the budget from a stage of this step on. The rank with `is_writer` records the change."""
        self.tokens = tokens
        if is_writer:
            step = self.progress.global_step + 1
            self.record(BudgetChange(step, stage.value, tokens, self.setting, reason, message))
            logger.log(logging.WARNING if reason == "out_of_memory" else logging.INFO, "%s", message)

    def state_dict(self) -> dict[str, Any]:
        """Return the budget and its measurements after the last complete step."""
        return {"tokens": self.tokens, "patch_price": self.patch_price, "measured": asdict(self.measured)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.tokens, self.patch_price = state["tokens"], state["patch_price"]
        self.measured = MeasuredPeaks(**state["measured"])
