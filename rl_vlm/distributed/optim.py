"""The optimizers of `train.optim`, and their state as tensors: AdamW, AdamW with 8-bit moments, and Adafactor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.shards import whole_shape

QUANTIZATION_MAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Constants that bitsandbytes keeps in every 8-bit state, with their names in the optimizer."""


def build_optimizer(trainable: Sequence[nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer of `train.optim`. Vectors, such as biases and norms, have no weight decay."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if len(whole_shape(p)) >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optim == "adafactor":
        from transformers import Adafactor

        # As in transformers' Trainer: the run's learning rate, not one relative to step and weights.
        return Adafactor(groups, lr=train.learning_rate, scale_parameter=False, relative_step=False)
    betas = (train.adam_beta1, train.adam_beta2)
    if train.optim == "adamw_8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        return AdamW8bit(groups, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon)
    # The fused kernel has no temporary tensors. With them, memory could run out after some weights are updated.
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon, fused=True)


def optimizer_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return a parameter's state as tensors, or nothing if it was never updated. Integers are 0-dimensional."""
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    return {name: torch.as_tensor(value) for name, value in state.items() if name not in QUANTIZATION_MAPS}


def load_optimizer_state(optimizer: Any, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
    """Replace a parameter's state by a result of `optimizer_state`."""
    values: dict[str, Any] = {name: loaded(value, parameter.device) for name, value in state.items()}
    if "absmax1" in state:
        maps = optimizer.name2qmap
        values |= {name: maps[key].to(parameter.device) for name, key in QUANTIZATION_MAPS.items()}
    optimizer.state[parameter] = values


def loaded(value: Tensor, device: torch.device) -> Tensor | int:
    """Copy a saved value in the form that optimizers keep: integers as `int`, all else as a tensor on the device."""
    if value.ndim == 0 and value.dtype == torch.int64:
        return int(value)
    return value.to(device, copy=True)
