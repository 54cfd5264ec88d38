"""Updates of the policy: AdamW and the learning-rate schedule."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import nn

from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.shards import whole_shape
from rl_vlm.distributed.strategy import Strategy


class Optimizer:
    """AdamW over a policy's trainable weights, with its learning-rate schedule.

    `policy` is the module to call for training: gradients of its forward are added up over ranks by `backward`.
    """

    def __init__(self, strategy: Strategy, policy: nn.Module, train: TrainConfig, num_steps: int) -> None:
        """Prepare a policy that `strategy` has placed, for `num_steps` optimizer steps."""
        from transformers import get_scheduler

        self.strategy = strategy
        self.trainable = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.adamw = build_adamw(list(self.trainable.values()), train)
        self.policy = strategy.prepare(policy, self.adamw)
        self.scheduler = get_scheduler(
            train.lr_scheduler_type,
            self.adamw,
            num_warmup_steps=warmup_steps(train.warmup_steps, num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=train.lr_scheduler_kwargs,
        )

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
        scheduler: Any = self.scheduler  # a LambdaLR for every schedule that the settings allow
        scheduler.last_epoch = num_steps
        rates = [
            rate * factor(num_steps) for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.adamw.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates


def warmup_steps(setting: float, num_steps: int) -> int:
    """Return the warm-up steps of a run of `num_steps`, rounded as in transformers.

    A setting below 1 is a fraction of the steps, rounded up; any other is a number of steps, rounded down.
    """
    return int(setting) if setting >= 1 else math.ceil(num_steps * setting)


def build_adamw(trainable: list[nn.Parameter], train: TrainConfig) -> torch.optim.AdamW:
    """Build AdamW. Vectors, such as biases and norms, have no weight decay."""
    groups = [
        {"params": [p for p in trainable if len(whole_shape(p)) >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        fused=True,  # without temporary tensors, for which memory could run out when some weights are updated
    )
