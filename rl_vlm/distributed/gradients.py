"""Sums over ranks, clipping and updates by torch, for gradients that are whole or DTensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_vlm.distributed.collectives import Collectives


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Clip the gradients and return their global norm before clipping. A `max_norm` of 0 does not clip."""
    norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"))
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def fill_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set missing gradients to 0, for instance the vision tower's in a step without images.

    DeepSpeed does the same. Otherwise optimizers would skip these weights, and their step counts would differ.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def sum_gradients(gradients: Sequence[Tensor], bucket: Tensor, ranks: Collectives) -> None:
    """Add up gradients over ranks, in place. Send as many at once as fit in `bucket`, a vector."""
    together: list[Tensor] = []
    for gradient in gradients:
        if sum(g.numel() for g in together) + gradient.numel() > len(bucket):
            sum_together(together, bucket, ranks)
            together = []
        if gradient.numel() > len(bucket):
            ranks.all_reduce(gradient)
        else:
            together.append(gradient)
    sum_together(together, bucket, ranks)


def sum_together(gradients: Sequence[Tensor], bucket: Tensor, ranks: Collectives) -> None:
    """Add up gradients over ranks by one all-reduce of `bucket`, which holds all of them."""
    if not gradients:
        return
    sizes = [gradient.numel() for gradient in gradients]
    flat = bucket[: sum(sizes)]
    parts = [part.view_as(g) for part, g in zip(flat.split(sizes), gradients, strict=True)]
    for part, gradient in zip(parts, gradients, strict=True):
        part.copy_(gradient)
    ranks.all_reduce(flat)
    for part, gradient in zip(parts, gradients, strict=True):
        gradient.copy_(part)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def reserve_update(optimizer: torch.optim.Optimizer) -> None:
    """Allocate missing gradients and AdamW's moments, so that its `step` allocates nothing while it changes weights.

    If memory runs out, the optimizer state is unchanged. Other optimizers create their state in the update.
    """
    parameters = parameters_of(optimizer)
    fill_gradients(parameters)
    is_adamw = isinstance(optimizer, torch.optim.AdamW)
    new = [parameter for parameter in parameters if is_adamw and not optimizer.state.get(parameter)]
    try:
        for parameter in new:
            step = torch.zeros((), device=parameter.device)  # on the weight's device, as the fused kernel needs it
            moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": step, **moments}
    except RuntimeError:
        for parameter in new:
            optimizer.state.pop(parameter, None)
        raise


def clip_and_update(
    ranks: Collectives, optimizer: torch.optim.Optimizer, max_norm: float, loss_is_finite: bool
) -> tuple[float, bool]:
    """Clip the gradients, and update the weights if loss and gradients are finite on all ranks.

    Arguments and results are as in `Strategy.update`.
    """
    parameters = parameters_of(optimizer)
    norm = clip_gradients(parameters, max_norm)
    num_nonfinite = ranks.sum([float(not math.isfinite(norm))])[0]
    is_finite = loss_is_finite and not num_nonfinite
    if is_finite:
        optimizer.step()
    return norm, is_finite
