"""Data parallelism: every rank holds the whole model, gradients and optimizer state.

    forward and backward of each micro-batch, on this rank alone ─► sum of the gradients over ranks ─► update

torch's DistributedDataParallel is not used: it exchanges gradients within the last backward, which a rank that runs out
of memory cannot leave.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.gradients import clip_and_update, parameters_of, reserve_update, sum_gradients
from rl_vlm.distributed.optim import load_optimizer_state, optimizer_state
from rl_vlm.distributed.shardings import UNSHARDED

BUCKET_ELEMENTS = 2**22
"""Gradient values that one all-reduce sends; 16 MiB. A larger gradient is sent alone."""


class DDP:
    """A `Strategy` that shards nothing. On one rank it is plain PyTorch."""

    name = "DDP"
    loads_empty = False
    equal_calls = UNSHARDED.shards_weights
    needs_all_gradients = UNSHARDED.kind.needs_all_gradients
    is_sharded = UNSHARDED.shards_state

    def __init__(self, ranks: Collectives, max_grad_norm: float) -> None:
        self.ranks = ranks
        self.max_grad_norm = max_grad_norm

    def place(self, policy: Any) -> None:
        """Move the policy to the rank's device."""
        policy.to(self.ranks.device)

    place_frozen = place

    def prepare(self, policy: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Broadcast the weights of rank 0, and return the policy, which computes this rank's gradients."""
        self.policy, self.optimizer = policy, optimizer
        for tensor in [*policy.parameters(), *policy.buffers()]:
            self.ranks.broadcast(tensor.detach())
        size = BUCKET_ELEMENTS if self.ranks.world_size > 1 else 0
        self.bucket = torch.empty(size, device=self.ranks.device)  # now, so that no update runs out of memory for it
        return policy

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Do nothing: gradients are exchanged in `update`."""
        return nullcontext()

    def backward(self, loss: Tensor, is_share: bool = True) -> None:
        """Add a micro-batch's gradients."""
        loss.backward()

    def reserve_update(self) -> None:
        """Allocate the memory that `update` needs."""
        reserve_update(self.optimizer)

    def update(self, loss_is_finite: bool) -> tuple[float, bool]:
        """Sum and clip the gradients, and update the weights if loss and gradients are finite on all ranks."""
        if self.ranks.world_size > 1:
            gradients = [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]
            sum_gradients(gradients, self.bucket, self.ranks)
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


def of_run(ranks: Collectives, config: RunConfig) -> DDP:
    """Build the strategy of a run."""
    return DDP(ranks, config.train.max_grad_norm)
