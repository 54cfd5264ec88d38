"""The token budget of micro-batches: in force in `Progress`, and each change recorded with its step.

A resumed run replays the changes after its checkpoint: it makes the micro-batches that the first run made, and so
computes the same sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rl_vlm.passes.changes import BudgetChange, BudgetReason, BudgetSetting
from rl_vlm.stages import Stage
from rl_vlm.types import Progress

logger = logging.getLogger(__name__)


class Budget:
    """The budget in force, on one rank. All ranks change it together."""

    def __init__(self, progress: Progress, setting: BudgetSetting, write: Callable[[BudgetChange], None]) -> None:
        """`write` records a change in the run directory."""
        self.progress = progress
        self.setting: BudgetSetting = setting
        self.write = write
        self.to_replay: Sequence[BudgetChange] = ()
        """Recorded changes after the checkpoint that the run is resumed from."""
        self.has_run_out = False
        """Whether this process has lowered the budget, beside what it replays."""

    @property
    def tokens(self) -> int:
        return self.progress.micro_batch_tokens

    def change(self, tokens: int, stage: Stage, reason: BudgetReason, message: str, is_writer: bool) -> None:
        """Set the budget from a stage of this step on, and say why; `is_writer` is the rank that records it."""
        self.progress.micro_batch_tokens = tokens
        self.progress.measured.is_used |= reason == "calibration"
        self.has_run_out |= reason == "out_of_memory"
        if is_writer:
            self.write(BudgetChange(self.progress.global_step + 1, stage.value, tokens, self.setting, reason, message))
            logger.log(logging.WARNING if reason == "out_of_memory" else logging.INFO, "%s", message)

    def replay(self, stage: Stage) -> list[BudgetChange]:
        """Make the changes that were recorded at this stage of this step, and return them.

        A budget that this run has lowered itself is not raised again.
        """
        found = [c for c in self.to_replay if (c.step, c.stage) == (self.progress.global_step + 1, stage)]
        for change in found:
            lowers = change.reason == "out_of_memory" or self.has_run_out
            tokens = min(change.micro_batch_tokens, self.tokens) if lowers else change.micro_batch_tokens
            self.progress.micro_batch_tokens = tokens
            self.progress.measured.is_used |= change.reason == "calibration"
        return found

    @property
    def replays_calibration(self) -> bool:
        """Return whether the run that is resumed has corrected the budget, now or later."""
        return any(change.reason == "calibration" for change in self.to_replay)
