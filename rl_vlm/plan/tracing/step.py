"""Trace the run's own training step on fake tensors, on one rank, without memory for weights or activations.

checkpoint's config ─ load_policy ─► Policy without storage ─ Trainer.step on given groups ─► bytes by phase
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.sampler import Draw
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference, load_reference
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.passes import Passes
from rl_vlm.passes.recovery import Recovery
from rl_vlm.plan.tracing.fake import fake_tensors, make_fake
from rl_vlm.plan.tracing.live import LiveBytes, Phase
from rl_vlm.rollout.collector import Collector
from rl_vlm.rollout.window import Window
from rl_vlm.stages import NO_ONE, LogprobStage, Stages
from rl_vlm.trainer import Trainer
from rl_vlm.types import Progress, ScoredGroup

T = TypeVar("T")


@dataclass(frozen=True)
class StepTrace:
    """Bytes of one rank in an optimizer step. All ranks of DDP have the same."""

    phases: dict[str, Phase]
    """Bytes before, at most in and after each part of the step."""

    @property
    def peak(self) -> int:
        """Return the most bytes in any phase."""
        return max(phase.peak for phase in self.phases.values())


def trace_steps(config: RunConfig, checkpoint: str, groups: Sequence[ScoredGroup], num_steps: int) -> list[StepTrace]:
    """Trace optimizer steps that each train on `groups`.

    `checkpoint` is the directory of a model, of which only the configuration is read. The first step makes the
    optimizer state, and later ones begin with it.
    """
    policy, reference = models_without_storage(config, checkpoint, groups)
    tokens = config.memory.micro_batch_tokens
    with fake_tensors() as live:
        make_models_fake(policy, reference)
        trainer = TracedTrainer(config, policy, reference, groups, num_steps, live, 0 if tokens == "auto" else tokens)
        return [trainer.traced_step() for _ in range(num_steps)]


def models_without_storage(
    config: RunConfig, checkpoint: str, groups: Sequence[ScoredGroup]
) -> tuple[Policy, Reference | None]:
    """Make the policy and the reference on the meta device, and compute the positions of the groups' prompts.

    Positions are cached. transformers computes them from nested lists, which fake tensors cannot hold.
    """
    policy = load_policy(config, checkpoint, empty=True)
    for group in groups:
        policy.family.prompt_positions(policy.transformer, group.group.prompt)
    return policy, load_reference(config, checkpoint, policy, resumed=None, empty=True)


def make_models_fake(policy: Policy, reference: Reference | None) -> None:
    """Replace the weights of the models by fake tensors."""
    make_fake(policy, *([reference.frozen] if reference and reference.frozen else []))


class Alone(Ranks):
    """The only rank, which has nothing to exchange."""

    def __init__(self) -> None:
        """Join no processes."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def is_main(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def max(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def gather(self, values: list[T]) -> list[T]:
        return values

    def agree(self) -> AbstractContextManager[None]:
        return nullcontext()


class GivenGroups(Collector):
    """Returns the same groups at every step, without sampling."""

    def __init__(self, groups: Sequence[ScoredGroup], num_iterations: int) -> None:
        self.groups = groups
        self.num_iterations = num_iterations

    def current(self, progress: Progress, metrics: StepMetrics) -> Window:
        """Return a new window, of one step."""
        fresh = [replace(group, old_logprobs={}, ref_logprobs={}) for group in self.groups]
        return Window.of([Draw(0, i) for i in range(len(fresh))], fresh, 1, self.num_iterations)

    def prefetch(self, progress: Progress) -> None:
        """Read no rows."""


class TracedTrainer(Trainer):
    """Trains on the same groups at every step, on one rank, and notes the bytes of each phase."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        reference: Reference | None,
        groups: Sequence[ScoredGroup],
        num_steps: int,
        live: LiveBytes,
        tokens: int,
        stages: Stages = NO_ONE,
    ) -> None:
        """`tokens` is the token budget."""
        ranks = Alone()
        self.live = live
        self.phases: dict[str, Phase] = {}
        optimizer = Optimizer(DDP(ranks, config.train.max_grad_norm), policy.train(), config.train, num_steps)
        collector = GivenGroups(groups, config.algorithm.num_iterations)
        progress = Progress(num_steps)
        recovery = Recovery(ranks, TokenBudget(ranks, progress, policy.vision, PlannedBudget(tokens)), stages)
        passes = Passes(config, ranks, policy, reference, optimizer, recovery)
        super().__init__(config, ranks, policy, reference, optimizer, collector, progress, passes)
        self.engine_checked = True  # there is no engine

    def traced_step(self) -> StepTrace:
        """Take a step and return its bytes."""
        self.phases = {}
        self.step()
        return StepTrace(self.phases)

    def add_logprobs(
        self, stage: LogprobStage, model: Policy | Reference | None, groups: Sequence[ScoredGroup], metrics: StepMetrics
    ) -> None:
        with self.live.phase() as self.phases[stage]:
            super().add_logprobs(stage, model, groups, metrics)

    def gradients(self, *args: Any) -> Tensor:
        with self.live.phase() as self.phases["forward_backward"]:
            return super().gradients(*args)

    def update(self, *args: Any) -> None:
        with self.live.phase() as self.phases["update"]:
            super().update(*args)

    def add_metrics(self, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Compute no metrics of rewards."""
