"""The instruments of a run that the settings ask for: the memory profile and the report."""

from __future__ import annotations

from rl_vlm.plan.build import planned_stages
from rl_vlm.run.instrument import Instrument, MakeInstrument, Observed
from rl_vlm.tools.profile.profiler import NUM_PROFILED, MemoryProfile
from rl_vlm.tools.profile.text import write_profile
from rl_vlm.tools.report.build import LiveReport


class WrittenProfile(MemoryProfile, Instrument):
    """A memory profile that writes its files after the measured steps, and at the end with later measurements."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed.peaks, planned_stages(observed.config, observed.ranks.world_size), observed.plan)
        self.ranks, self.directory = observed.ranks, observed.directory
        self.num_steps = 0

    def after_step(self, is_last: bool) -> None:
        self.num_steps += 1
        if self.num_steps == NUM_PROFILED or is_last:
            write_profile(self, self.ranks, self.directory)


def memory_profile(observed: Observed) -> WrittenProfile | None:
    """Make the memory profile, if `log.memory_profile` is set."""
    return WrittenProfile(observed) if observed.config.log.memory_profile else None


def live_report(observed: Observed) -> LiveReport | None:
    """Make the report on the main process, if `log.report` is set."""
    return LiveReport(observed.directory) if observed.config.log.report and observed.ranks.is_main else None


INSTRUMENTS: tuple[MakeInstrument, ...] = (memory_profile, live_report)
