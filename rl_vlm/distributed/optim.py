"""The optimizers of `train.optim`, and their state as tensors: AdamW, AdamW with 8-bit moments, and Adafactor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.shards import whole_shape
from rl_vlm.errors import LaunchError, require_bitsandbytes

WHOLE_WEIGHTS = {
    "adamw_8bit": "its moments are quantized in blocks of 256 values, which shards would cut",
    "adafactor": "its moments are those of the rows and columns of whole matrices",
}
"""Optimizers that need whole weights, with the reason."""
QUANTIZATION_MAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Constants that bitsandbytes keeps in every 8-bit state, with their names in the optimizer."""


def check_optim(optim: str, launcher: str, shards_state: bool) -> None:
    """Raise an error if an optimizer cannot be used.

    Raises LaunchError if ranks would shard weights that it needs whole, and ConfigError if its package is missing.
    `launcher` names the launcher's request in the message.
    """
    refuse_shards(optim, launcher, shards_state)
    if optim == "adamw_8bit":
        require_bitsandbytes("train.optim: adamw_8bit")


def refuse_shards(optim: str, sharding: str, shards_state: bool) -> None:
    """Raise LaunchError if ranks would shard weights that an optimizer needs whole. The message names `sharding`."""
    if shards_state and optim in WHOLE_WEIGHTS:
        raise LaunchError(
            f"train.optim: {optim} cannot be used with {sharding}: {WHOLE_WEIGHTS[optim]}. Use adamw_torch, whose "
            "moments are sharded, or train with DDP (launch/accelerate/ddp.yaml)"
        )


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
