"""Trace the passes of a run's training step on fake tensors, on one rank, without memory for weights or activations.

checkpoint's config ─ load_policy ─► Policy without storage ─ Passes and Optimizer on given groups ─► bytes by stage
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from rl_vlm.algorithm.objective import Objective, configured_loss, contributes
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives, SingleRank
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.progress import SignOfLife
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference, load_reference
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.passes import Passes
from rl_vlm.passes.peaks import Block, PeakCounter, Peaks, StagePeaks
from rl_vlm.passes.recovery import Recovery
from rl_vlm.plan.tracing.fake import fake_tensors, make_fake
from rl_vlm.stages import Listener, LogprobStage, Stage, Stages
from rl_vlm.types import Progress, ScoredGroup

CPU = torch.device("cpu")


def trace_steps(
    config: RunConfig, checkpoint: str, groups: Sequence[ScoredGroup], num_steps: int
) -> list[Mapping[Stage, Block]]:
    """Trace optimizer steps that each train on `groups`. Returns the bytes of each step by stage.

    `checkpoint` is the directory of a model, of which only the configuration is read. The first step makes the
    optimizer state, and later ones begin with it. All ranks of DDP have the same bytes.
    """
    policy, reference = models_without_storage(config, checkpoint, groups)
    tokens = config.memory.micro_batch_tokens
    with fake_tensors() as live:
        make_models_fake(policy, reference)
        steps = GivenSteps(config, policy, reference, num_steps, live, 0 if tokens == "auto" else tokens)
        return [steps.take(groups) for _ in range(num_steps)]


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


class GivenSteps:
    """Optimizer steps on groups that are given, on one rank, whose bytes a counter measures by stage."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        reference: Reference | None,
        num_steps: int,
        counter: PeakCounter,
        tokens: int,
        ranks: Collectives | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        """`tokens` is the token budget. `ranks` is a single rank, by default on the CPU."""
        self.config = config
        self.policy = policy
        self.reference = reference
        self.ranks = ranks or SingleRank(CPU)
        self.peaks = StagePeaks(Peaks(counter))
        self.stages = Stages(SignOfLife(), self.peaks, *listeners)
        self.loss_form = configured_loss(config.algorithm)
        self.contributes = partial(contributes, has_kl=reference is not None, trains_on=policy.trains_on)
        strategy = DDP(self.ranks, config.train.max_grad_norm)
        self.optimizer = Optimizer(strategy, policy.train(), config.train, num_steps)
        budget = TokenBudget(self.ranks, Progress(num_steps), policy.vision, PlannedBudget(tokens))
        self.passes = Passes(
            config, self.ranks, policy, reference, self.optimizer, Recovery(self.ranks, budget, self.stages)
        )

    def take(self, groups: Sequence[ScoredGroup]) -> Mapping[Stage, Block]:
        """Take an optimizer step on the groups, as `Trainer.step` does after a rollout. Returns its bytes by stage."""
        groups = [replace(group, old_logprobs={}, ref_logprobs={}) for group in groups]
        for model in filter(None, (self.policy, self.reference)):
            model.start_step()
        if self.reference is not None:
            self.add_logprobs(Stage.REF_LOGPROBS, self.reference, groups)
        with self.stages.run(Stage.TRAINING):
            entropies = partial(self.passes.outputs, Stage.ENTROPY, self.policy, groups)
            objective = Objective.of_step(
                self.config, self.ranks, groups, groups, 1, self.contributes, entropies, self.loss_form
            )
            loss, _ = self.passes.gradients(objective, keeps_logprobs=self.config.algorithm.num_iterations > 1)
        with self.stages.run(Stage.UPDATE):  # after the passes, whose bytes do not include what it leaves behind
            self.passes.recovery.reserve(self.optimizer.strategy.reserve_update)
            self.optimizer.strategy.update(math.isfinite(loss.item()))
            self.optimizer.strategy.clear_gradients()
            self.optimizer.advance_schedule()
        return self.peaks.take()

    def add_logprobs(self, stage: LogprobStage, model: Policy | Reference, groups: Sequence[ScoredGroup]) -> None:
        """Compute the old or reference log-probs of the groups."""
        with self.stages.run(stage):
            self.passes.add_logprobs(stage, model, groups, self.contributes)
