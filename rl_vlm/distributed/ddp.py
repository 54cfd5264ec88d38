"""DistributedDataParallel: every rank holds the whole model, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rl_vlm.distributed.gradients import clip_and_update
from rl_vlm.distributed.optim import load_optimizer_state, optimizer_state
from rl_vlm.distributed.ranks import Ranks


class DDP:
    """A `Strategy` that shards nothing. On one rank it is plain PyTorch."""

    name = "DDP"
    loads_empty = False
    equal_calls = False
    needs_all_gradients = False
    is_sharded = False

    def __init__(self, ranks: Ranks, max_grad_norm: float) -> None:
        self.ranks = ranks
        self.max_grad_norm = max_grad_norm

    def place(self, policy: Any) -> None:
        """Move the policy to the rank's device."""
        policy.to(self.ranks.device)

    place_frozen = place

    def prepare(self, policy: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Wrap the policy in DistributedDataParallel if there are several ranks."""
        self.optimizer = optimizer
        self.policy = policy if self.ranks.world_size == 1 else self.ranks.accelerator.prepare_model(policy)
        return self.policy

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Run one micro-batch's forward and backward inside. Gradients are exchanged in the last one of a step."""
        with nullcontext() if last or self.ranks.world_size == 1 else self.ranks.accelerator.no_sync(self.policy):
            yield

    def backward(self, loss: Tensor, is_share: bool = True) -> None:
        """Add a micro-batch's gradients."""
        (loss * (self.ranks.world_size if is_share else 1)).backward()  # DDP averages over ranks

    def update(self, loss_is_finite: bool) -> tuple[float, bool]:
        """Clip the gradients, and update the weights if loss and gradients are finite on all ranks."""
        return clip_and_update(self.ranks, self.optimizer, self.max_grad_norm, loss_is_finite)

    def clear_gradients(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def gathered(self) -> AbstractContextManager[None]:
        """Do nothing: every rank has all weights."""
        return nullcontext()

    gathered_by_layer = gathered

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's optimizer state, or nothing if it was never updated."""
        return optimizer_state(self.optimizer, parameter)

    def load_optimizer_state(self, states: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        """Load the states that `optimizer_state` returned."""
        for parameter, state in states.items():
            load_optimizer_state(self.optimizer, parameter, state)
