"""Updates of the policy: its wrapper for several ranks, AdamW and the learning-rate schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.ranks import Ranks


class Optimizer:
    """AdamW over a policy's trainable weights, with its learning-rate schedule.

    `policy` is the wrapped policy: gradients of its forward are added up over ranks by `backward`.
    """

    def __init__(self, ranks: Ranks, policy: nn.Module, train: TrainConfig, num_steps: int) -> None:
        """Prepare the policy, which must be on the rank's device, for `num_steps` optimizer steps."""
        from transformers import get_scheduler

        self.ranks = ranks
        self.max_grad_norm = train.max_grad_norm
        self.trainable = [p for p in policy.parameters() if p.requires_grad]
        self.adamw = build_adamw(self.trainable, train)
        self.policy, self.prepared = ranks.accelerator.prepare(policy, self.adamw)
        self.scheduler = get_scheduler(
            train.lr_scheduler_type,
            self.adamw,
            num_warmup_steps=warmup_steps(train.warmup_steps, num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=train.lr_scheduler_kwargs,
        )

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Run one micro-batch's forward and backward inside. Ranks exchange gradients only in the step's `last` one."""
        with nullcontext() if last else self.ranks.accelerator.no_sync(self.policy):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradients. Losses are shares of a sum over ranks; they are scaled, since DDP averages."""
        self.ranks.accelerator.backward(loss * self.ranks.world_size)

    def clip_gradients(self) -> float:
        """Clip the gradients and return their global norm before that. A `max_grad_norm` of 0 does not clip."""
        return float(self.ranks.accelerator.clip_grad_norm_(self.trainable, self.max_grad_norm or float("inf")))

    def update(self) -> None:
        """Update the weights by the gradients."""
        self.prepared.step()

    def clear_gradients(self) -> None:
        """Drop the gradients, after an update or instead of one."""
        self.adamw.zero_grad()

    def advance_schedule(self) -> None:
        """Set the learning rate of the next step. It depends on the step count, which includes skipped updates."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    @property
    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer and schedule, for a checkpoint."""
        return {"optimizer": self.adamw.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the moments and the step count that `state_dict` returned. Settings are those of this run."""
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.adamw.param_groups]
        scheduler: Any = self.scheduler  # a LambdaLR for every schedule that the settings allow
        base_lrs, factors = scheduler.base_lrs, scheduler.lr_lambdas
        self.adamw.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"] | {"base_lrs": base_lrs})
        for group, settings, base_lr, factor in zip(self.adamw.param_groups, own, base_lrs, factors, strict=True):
            group.update(settings, lr=base_lr * factor(scheduler.last_epoch))
        scheduler._last_lr = [group["lr"] for group in self.adamw.param_groups]


def warmup_steps(setting: float, num_steps: int) -> int:
    """Return the warm-up steps of a run of `num_steps`, rounded as in transformers.

    A setting below 1 is a fraction of the steps, rounded up; any other is a number of steps, rounded down.
    """
    return int(setting) if setting >= 1 else math.ceil(num_steps * setting)


def build_adamw(trainable: list[nn.Parameter], train: TrainConfig) -> torch.optim.AdamW:
    """Build AdamW. Vectors, such as biases and norms, have no weight decay."""
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
    )
