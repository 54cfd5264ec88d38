"""`log.memory_profile`: measure the first steps of a run by the stages of its memory plan, and by module.

stages ─► peak of each       first training passes ─► bytes that each module keeps
                             micro-batches ─► the largest, which the plan predicts for ─► report.py
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rl_vlm.model.policy import Policy
from rl_vlm.model.vision import num_patches
from rl_vlm.passes.micro_batches import batch_tokens
from rl_vlm.passes.peaks import Peaks, StagePeaks
from rl_vlm.passes.schedule import Round
from rl_vlm.plan.memory import Load, MemoryPlan
from rl_vlm.stages import Stage
from rl_vlm.tools.profile.saved import SavedBytes

NUM_PROFILED = 3
"""Number of measured blocks per stage. Later steps run at full speed."""


class MemoryProfile(StagePeaks):
    """Measurements of one rank. Bytes that it holds at construction are subtracted."""

    def __init__(self, peaks: Peaks, stages: Container[Stage], plan: MemoryPlan | None) -> None:
        """Measure these stages; `plan` predicts them."""
        super().__init__(peaks, stages, NUM_PROFILED)
        self.plan = plan
        with peaks.block() as block:
            pass
        self.base = block.before
        self.loads: set[Load] = set()
        """Micro-batches of the measured steps."""
        self.policy: Policy | None = None
        self.saved: SavedBytes | None = None

    def attach(self, policy: Policy) -> None:
        """Measure the micro-batches of a policy, and the bytes that its modules keep in the first training passes."""
        self.policy, self.saved = policy, SavedBytes(policy, policy.transformer)

    @property
    def stage_peaks(self) -> dict[str, int]:
        """Return the peak bytes of each stage."""
        return {stage.value: block.peak - self.base for stage, block in self.largest.items()}

    @contextmanager
    def passes(self, stage: Stage) -> Iterator[None]:
        """Measure training, and count the bytes that modules keep in its first passes."""
        is_first = stage is Stage.TRAINING and self.num_measured[stage] == 0
        with super().passes(stage), self.saved if is_first and self.saved is not None else nullcontext():
            yield

    def work(self, work: Round) -> AbstractContextManager[Any]:
        """Note the loads of a micro-batch."""
        if self.num_measured[Stage.TRAINING] < NUM_PROFILED:
            self.loads.update(self.loads_of(work))
        return nullcontext()

    def loads_of(self, work: Round) -> Iterator[Load]:
        """Yield the tokens and patches of a forward, and of each separate run of the vision tower."""
        assert self.policy is not None
        config, batch = self.policy.transformer.config, work.forward.batch
        apart = {each.digest for subgroup in batch.subgroups for each in subgroup.apart}
        within = {each.digest: each for each in batch.rendered if each.digest not in apart}
        tokens = batch_tokens(batch, vision_tokens=lambda rendered: 0)
        yield Load(tokens, sum(num_patches(config, each) for each in within.values()))
        for tower_backward in work.tower_backwards:
            yield Load(0, num_patches(config, tower_backward.rendered))
