"""Updates of the policy: an optimizer of `optim.py` and the learning-rate schedule."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rl_vlm.config.batches import warmup_steps
from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.optim import build_optimizer
from rl_vlm.distributed.schedules import Span, learning_rate_factor
from rl_vlm.distributed.strategy import Strategy


class Optimizer:
    """The torch optimizer of a policy's trainable weights, with its learning-rate schedule.

    `policy` is the module to call for training. The strategy adds up its gradients over ranks.
    """

    def __init__(self, strategy: Strategy, policy: nn.Module, train: TrainConfig, num_steps: int) -> None:
        """Prepare a policy that `strategy` has placed, for `num_steps` optimizer steps."""
        self.strategy = strategy
        self.trainable = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.torch_optimizer = build_optimizer(list(self.trainable.values()), train)
        self.policy = strategy.prepare(policy, self.torch_optimizer)
        span = Span(train.learning_rate, warmup_steps(train.warmup_steps, num_steps), num_steps)
        factor = learning_rate_factor(train.lr_scheduler_type, span, train.lr_scheduler_kwargs)
        self.scheduler = LambdaLR(self.torch_optimizer, factor)

    def advance_schedule(self) -> None:
        """Set the learning rate of the next step. It depends on the step count, which includes skipped updates."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    @property
    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def set_step(self, num_steps: int) -> None:
        """Set the learning rate of the step after `num_steps`, for a resumed run."""
        scheduler: Any = self.scheduler
        scheduler.last_epoch = num_steps
        rates = [
            rate * factor(num_steps) for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.torch_optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
