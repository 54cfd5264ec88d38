"""Instruments observe a run from outside. The caller of a run passes functions that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.model.policy import Policy
from rl_vlm.passes.peaks import Peaks, counter_of
from rl_vlm.plan.memory import MemoryPlan
from rl_vlm.stages import Listener


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

    def after_step(self, is_last: bool) -> None:
        """Hear that a step is complete and its metrics are written."""

    def end(self) -> None:
        """Hear that the run has ended. After an error, ranks may call this alone."""


MakeInstrument = Callable[[Observed], Instrument | None]
"""Makes an instrument on each rank, or none if the settings ask for none."""
