"""Clipping and updates by torch, for gradients that are whole or DTensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rl_vlm.distributed.ranks import Ranks


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Clip the gradients and return their global norm before that. A `max_norm` of 0 does not clip."""
    norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"))
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def fill_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set missing gradients to 0, such as those of the vision tower in a step without images.

    DeepSpeed does the same. Optimizers skip a weight without a gradient, which would then have a step count of its own.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def clip_and_update(
    ranks: Ranks, optimizer: torch.optim.Optimizer, max_norm: float, loss_is_finite: bool
) -> tuple[float, bool]:
    """Clip the gradients, and update the weights if loss and gradients are finite on all ranks.

    Arguments and results are those of `Strategy.update`.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fill_gradients(parameters)
    norm = clip_gradients(parameters, max_norm)
    num_nonfinite = ranks.sum([float(not math.isfinite(norm))])[0]
    is_finite = loss_is_finite and not num_nonfinite
    if is_finite:
        optimizer.step()
    return norm, is_finite
