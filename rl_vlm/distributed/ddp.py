"""Data parallelism: every rank holds the whole model, gradients and optimizer state.

    forward and backward of each micro-batch, on this rank alone ─► sum of the gradients over ranks ─► update

torch's DistributedDataParallel is not used: it exchanges gradients within the last backward, which a rank that runs out
of memory cannot leave.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.gradients import parameters_of, sum_gradients
from rl_vlm.distributed.shardings import UNSHARDED
from rl_vlm.distributed.strategy import Strategy

BUCKET_ELEMENTS = 2**22
"""Gradient values that one all-reduce sends; 16 MiB. A larger gradient is sent alone."""


class DDP(Strategy):
    """Shards nothing. On one rank it is plain PyTorch."""

    def __init__(self, ranks: Collectives, max_grad_norm: float) -> None:
        super().__init__(ranks, UNSHARDED, max_grad_norm)

    def prepare(self, policy: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Broadcast the weights of rank 0, and return the policy, which computes this rank's gradients."""
        for tensor in [*policy.parameters(), *policy.buffers()]:
            self.ranks.broadcast(tensor.detach())
        size = BUCKET_ELEMENTS if self.ranks.world_size > 1 else 0
        self.bucket = torch.empty(size, device=self.ranks.device)  # now, so that no update runs out of memory for it
        return super().prepare(policy, optimizer)

    def update(self, loss_is_finite: bool) -> tuple[float, bool]:
        if self.ranks.world_size > 1:
            gradients = [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]
            sum_gradients(gradients, self.bucket, self.ranks)
        return super().update(loss_is_finite)


def of_run(ranks: Collectives, config: RunConfig) -> DDP:
    """Build the strategy of a run."""
    return DDP(ranks, config.train.max_grad_norm)
