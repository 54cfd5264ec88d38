"""The training phase of an optimizer step on given groups: micro-batches, forward and backward, update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from rl_vlm.algorithm.objective import Objective
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.sampler import Draw
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.strategy import select_strategy
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.fused import fuse_layers
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.passes.budget import PlannedBudget
from rl_vlm.plan.tracing.step import given_trainer
from rl_vlm.rollout.window import DrawnGroup, Window
from rl_vlm.trainer import Trainer
from rl_vlm.types import MicroBatch, ScoredGroup


def make_trainer(checkpoint: Path, model: dict[str, Any], memory: dict[str, Any]) -> Trainer:
    """Build a trainer that has no collector; `model` and `memory` are settings of these sections."""
    memory = {"micro_batch_tokens": 8192} | memory
    config = RunConfig.model_validate({"model": {"model_name_or_path": str(checkpoint), **model}, "memory": memory})
    return trainer_of(config, load_policy(config, str(checkpoint)).train())


def trainer_of(config: RunConfig, policy: Policy, patch_price: float = 0.0) -> Trainer:
    """Build a trainer of this policy that has no collector, with the number of the config as its token budget."""
    ranks = Ranks()
    strategy = select_strategy(ranks, config)
    strategy.place(policy)
    fuse_layers(policy, config, strategy.equal_calls)
    assert config.memory.micro_batch_tokens != "auto"
    planned = PlannedBudget(config.memory.micro_batch_tokens, patch_price)
    return given_trainer(config, ranks, strategy, policy, None, (), planned, num_steps=1000)


def forward_backward(trainer: Trainer, groups: Sequence[ScoredGroup]) -> tuple[Tensor, Objective]:
    """Run forward and backward over all groups, and return the loss and the objective."""
    trainer.start_step()
    window = Window([[DrawnGroup(Draw(0, 0), group) for group in groups]], num_iterations=1)
    objective = trainer.objective(window, groups, StepMetrics())
    return trainer.passes.gradients(objective, keeps_logprobs=False)[0], objective


def accumulate(trainer: Trainer, groups: Sequence[ScoredGroup], batches: Sequence[MicroBatch]) -> None:
    """Add the gradients of these micro-batches of the groups."""
    with mock.patch("rl_vlm.passes.rounds.make_micro_batches", return_value=list(batches)):
        forward_backward(trainer, groups)


def train(trainer: Trainer, groups: Sequence[ScoredGroup]) -> None:
    """Train on the groups, as an optimizer step does."""
    loss, objective = forward_backward(trainer, groups)
    trainer.update(loss, objective.contributing, StepMetrics())
