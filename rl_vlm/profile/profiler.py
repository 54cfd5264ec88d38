"""`log.memory_profile`: measure the first steps of a run by the phases of its memory plan, and by module.

build: load ─ attach to the run ─ phase ─► peak of the phase
                                 first training pass ─► bytes that each module keeps
                                 micro-batches ─► the largest, which the plan predicts for ─► report.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from rl_vlm.model.vision import num_patches
from rl_vlm.passes.micro_batches import batch_tokens
from rl_vlm.passes.peaks import Peaks
from rl_vlm.plan.memory import Load, MemoryPlan
from rl_vlm.profile.saved import SavedBytes
from rl_vlm.types import Forward, TowerBackward

if TYPE_CHECKING:
    from rl_vlm.trainer import Trainer

NUM_PROFILED = 3
"""Calls of a method that are measured. Later steps run at full speed."""


class MemoryProfile:
    """Measurements of one rank, beside what it holds when this is made."""

    def __init__(self, peaks: Peaks) -> None:
        self.peaks = peaks
        with peaks.block() as block:
            pass
        self.base = block.before
        self.phase_peaks: dict[str, int] = {}
        self.loads: set[Load] = set()
        """Micro-batches that the policy was called with."""
        self.saved: SavedBytes | None = None
        self.plan: MemoryPlan | None = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out of all measurements what a block leaves behind, such as imported modules."""
        with self.peaks.block(apart=True) as block:
            yield
        self.base += block.after - block.before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block. It does not count as part of the phase around it."""
        with self.peaks.block(apart=True) as block:
            yield
        self.phase_peaks[name] = max(self.phase_peaks.get(name, 0), block.peak - self.base)

    def attach(self, trainer: Trainer, plan: MemoryPlan | None) -> None:
        """Measure the phases of a trainer's steps, and predict them by `plan`."""
        self.plan, self.saved = plan, SavedBytes(trainer.policy, trainer.policy.transformer)
        noting = trainer.policy.register_forward_pre_hook(self.note_load)
        self.watch(trainer.collector, "collect", "rollout")
        if trainer.config.rollout.engine != "hf":
            self.watch(trainer.collector.engine, "sync", "weight sync")
        self.watch(trainer.passes, "outputs", "log-probs")
        self.watch(trainer.passes, "gradients", "forward and backward", first=self.saved, last=noting.remove)
        self.watch(trainer, "update", "update")

    def watch(
        self,
        owner: object,
        method: str,
        phase: str,
        first: AbstractContextManager[Any] | None = None,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        """Measure the first calls of a method of `owner`, which is then as before.

        The first of them runs in the context `first`. `last` is called after the last of them.
        """
        original, num_calls = getattr(owner, method), 0

        @wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            inside = first if first is not None and num_calls == 1 else nullcontext()
            try:
                with self.phase(phase), inside:
                    return original(*args, **kwargs)
            finally:
                if num_calls == NUM_PROFILED:
                    delattr(owner, method)
                    last()

        setattr(owner, method, measured)

    def note_load(self, policy: Any, args: tuple[Any, ...]) -> None:
        """Note the tokens and patches of a training or log-prob pass."""
        config, work = policy.transformer.config, args[0]
        if isinstance(work, TowerBackward):
            self.loads.add(Load(0, num_patches(config, work.prompt)))
        elif isinstance(work, Forward):
            within = [subgroup.prompt for subgroup in work.batch.subgroups if not subgroup.vision_apart]
            tokens = batch_tokens(work.batch, vision_tokens=lambda prompt: 0)
            self.loads.add(Load(tokens, sum(num_patches(config, prompt) for prompt in within)))
