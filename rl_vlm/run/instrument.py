"""Instruments observe a run from outside. The caller of a run passes functions that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.model.policy import Policy
from rl_vlm.passes.peaks import Peaks, counter_of
from rl_vlm.plan.memory import MemoryPlan
from rl_vlm.stages import Listener
from rl_vlm.types import Progress


@dataclass
class Observed:
    """A rank of a run before its models are loaded."""

    config: RunConfig
    ranks: Ranks
    directory: Path
    """The run directory."""
    plan: MemoryPlan | None

    @cached_property
    def peaks(self) -> Peaks:
        """Return the device's peaks, which all measurements share. Raise ConfigError if they cannot be measured."""
        return Peaks(counter_of(self.ranks.device))


class Instrument(Listener):
    """Hears of the stages of a run and of its steps. All ranks call each method together."""

    def attach(self, policy: Policy) -> None:
        """Hear that the models are loaded."""

    def begin(self, progress: Progress) -> None:
        """Hear that the run is about to evaluate and to take its steps. If it is resumed, some are complete."""

    def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Hear of an evaluation. Names of metrics begin with `eval_`."""

    def after_line(self, line: dict[str, Any]) -> None:
        """Hear that a line of `metrics.jsonl` is written."""

    def after_save(self, checkpoint: Path) -> None:
        """Hear that a checkpoint is complete, which may be steps after its own."""

    def after_step(self, is_last: bool) -> None:
        """Hear that a step is complete and its metrics are written."""

    def asks_to_stop(self) -> bool:
        """Return whether the run should save its last step and end. The run asks after `after_step`."""
        return False

    def complete(self) -> None:
        """Hear that the run is complete, and its summary is written."""

    def end(self) -> None:
        """Hear that the run has ended. After an error, ranks may call this alone."""


MakeInstrument = Callable[[Observed], Instrument | None]
"""Makes an instrument on each rank, or none if the settings ask for none."""
