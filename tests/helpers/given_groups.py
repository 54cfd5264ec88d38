"""A trainer of given groups, on one rank, to look at its passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rl_vlm.algorithm.objective import Objective
from rl_vlm.data.sampler import Draw
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.ddp import DDP
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.plan.tracing.step import given_trainer
from rl_vlm.rollout.window import DrawnGroup, Window
from rl_vlm.trainer import Trainer
from rl_vlm.types import Progress, ScoredGroup
from tests.helpers.tiny_run import make_config

CPU = torch.device("cpu")
WHOLE = 8192
"""A token budget that holds all groups of a test."""


def make_budget(policy: Policy, tokens: int = WHOLE) -> TokenBudget:
    """A budget of one rank."""
    return TokenBudget(Collectives(CPU), Progress(1), policy.vision, PlannedBudget(tokens))


def make_trainer(
    policy: Policy,
    groups: Sequence[ScoredGroup],
    strategy: DDP | None = None,
    reference: Reference | None = None,
    ranks: Collectives | None = None,
    **settings: Any,
) -> Trainer:
    """A trainer that is given its groups, on one rank, with the policy's weights on the host."""
    config = make_config("unused", Path("unused"), **{"micro_batch_tokens": WHOLE, **settings})
    ranks = ranks or Collectives(CPU)
    planned = PlannedBudget(cast(int, config.memory.micro_batch_tokens))
    return given_trainer(config, ranks, cast(Any, strategy or DDP(ranks, 0.0)), policy, reference, groups, planned)


def accumulate(trainer: Trainer, groups: Sequence[ScoredGroup]) -> Tensor:
    """The loss of the step, whose gradients the policy then has."""
    return trainer.passes.gradients(objective_of(trainer, groups), keeps_logprobs=False)[0]


def objective_of(trainer: Trainer, groups: Sequence[ScoredGroup]) -> Objective:
    """The objective of a step on these groups, in a window of its own."""
    window = Window([[DrawnGroup(Draw(0, i), group) for i, group in enumerate(groups)]], num_iterations=1)
    return trainer.objective(window, groups, StepMetrics())
