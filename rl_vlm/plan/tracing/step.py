"""Trace a run's training step on fake tensors, on one rank, without memory for weights or activations.

checkpoint's config ─ load_policy ─► Policy without storage ─ Trainer on given groups ─► bytes by stage
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.sign_of_life import SignOfLife
from rl_vlm.distributed.strategy import Strategy
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference, load_reference
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.passes import Passes
from rl_vlm.passes.peaks import Block, PeakCounter, Peaks, StagePeaks
from rl_vlm.passes.recovery import Recovery
from rl_vlm.plan.tracing.fake import fake_tensors, make_fake
from rl_vlm.rollout.window import GivenWindows
from rl_vlm.stages import NO_ONE, Listener, Stage, Stages
from rl_vlm.trainer import Trainer
from rl_vlm.types import Progress, ScoredGroup

CPU = torch.device("cpu")


def trace_steps(
    config: RunConfig, checkpoint: str, groups: Sequence[ScoredGroup], num_steps: int
) -> list[Mapping[Stage, Block]]:
    """Trace optimizer steps that each train on `groups`. Returns the bytes of each step by stage.

    `checkpoint` is the directory of a model. Only its config is read. The first step makes the optimizer state, and
    later steps start with it. All ranks of DDP hold the same bytes.
    """
    policy, reference = models_without_storage(config, checkpoint, groups)
    tokens = config.memory.micro_batch_tokens
    with fake_tensors() as live:
        make_models_fake(policy, reference)
        steps = TracedSteps(config, policy, reference, groups, num_steps, live, 0 if tokens == "auto" else tokens)
        return [steps.take() for _ in range(num_steps)]


def models_without_storage(
    config: RunConfig, checkpoint: str, groups: Sequence[ScoredGroup]
) -> tuple[Policy, Reference | None]:
    """Make the policy and the reference on the meta device, and compute positions and digests of the groups' prompts.

    Both are cached. Digests need bytes, and transformers computes positions from nested lists, and fake tensors hold
    neither.
    """
    policy = load_policy(config, checkpoint, empty=True)
    for group in groups:
        assert group.group.prompt.digest
        policy.family.prompt_positions(policy.transformer, group.group.prompt)
    return policy, load_reference(config, checkpoint, policy, resumed=None, empty=True)


def make_models_fake(policy: Policy, reference: Reference | None) -> None:
    """Replace the weights of the models by fake tensors."""
    make_fake(policy, *([reference.frozen] if reference and reference.frozen else []))


class TracedSteps:
    """Steps of a trainer on given groups, on one rank. A counter measures their bytes by stage."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        reference: Reference | None,
        groups: Sequence[ScoredGroup],
        num_steps: int,
        counter: PeakCounter,
        tokens: int,
        ranks: Collectives | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        """`tokens` is the token budget. `ranks` is a single rank, by default on the CPU.

        The checks before the first step are left out. They compare values, and their rows are a few short ones.
        """
        config = config.model_copy(update={"model": config.model.model_copy(update={"verify": "off"})})
        ranks = ranks or Collectives(CPU)
        self.peaks = StagePeaks(Peaks(counter))
        stages = Stages(SignOfLife(), self.peaks, *listeners)
        planned, strategy = PlannedBudget(tokens), DDP(ranks, config.train.max_grad_norm)
        self.trainer = given_trainer(config, ranks, strategy, policy, reference, groups, planned, num_steps, stages)

    def take(self) -> Mapping[Stage, Block]:
        """Take an optimizer step. Returns its bytes by stage."""
        self.trainer.step()
        return self.peaks.take()


def given_trainer(
    config: RunConfig,
    ranks: Collectives,
    strategy: Strategy,
    policy: Policy,
    reference: Reference | None,
    groups: Sequence[ScoredGroup],
    planned: PlannedBudget,
    num_steps: int = 1,
    stages: Stages = NO_ONE,
) -> Trainer:
    """Build a trainer whose steps train on `groups`, without an engine. `strategy` has placed the policy."""
    optimizer = Optimizer(strategy, policy.train(), config.train, num_steps)
    progress = Progress(num_steps)
    recovery = Recovery(ranks, TokenBudget(ranks, progress, policy.vision, planned), stages)
    passes = Passes(config, ranks, policy, reference, optimizer, recovery)
    windows = GivenWindows(groups, config.algorithm.num_iterations)
    return Trainer(config, ranks, policy, reference, optimizer, windows, progress, passes, stages)
