"""Sharded parameters: DTensors (FSDP2) or parameters of DeepSpeed ZeRO-3. Each rank holds a part of each."""

from __future__ import annotations

import copy
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from torch.distributed import all_gather_into_tensor, get_rank, get_world_size
from torch.distributed.tensor import distribute_tensor


@no_type_check  # compiled layers call it, and the checks of tests cannot be compiled
def is_shard(parameter: Tensor) -> bool:
    """Return whether the parameter is sharded: a DTensor (FSDP2), or a parameter of DeepSpeed ZeRO-3."""
    return hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id")


def whole_shape(parameter: Any) -> torch.Size:
    """Return the shape of the unsharded parameter. A DTensor reports it as its own shape."""
    return getattr(parameter, "ds_shape", parameter.shape)


def local_part(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter, without gradients. Changing it changes the parameter.

    If one strategy shards two parameters of equal shapes, their parts correspond.
    """
    if hasattr(parameter, "to_local"):
        return parameter.detach().to_local()
    if hasattr(parameter, "ds_id"):
        part = parameter.ds_tensor.detach()
        start = part.numel() * get_rank(parameter.ds_process_group)
        return part[: max(0, parameter.ds_numel - start)]  # the rest is padding, with any values
    return parameter.detach()


def rank_part(parameter: Any, value: Tensor, rank: int) -> Tensor:
    """Return a rank's part of unsharded values of a parameter of DeepSpeed ZeRO-3, without padding."""
    size = parameter.ds_tensor.numel()
    return value.flatten()[rank * size : (rank + 1) * size]


def whole(parameter: Any) -> Tensor:
    """Return the parameter, or an all-gathered copy if it is sharded; all ranks must call this together."""
    if hasattr(parameter, "full_tensor"):
        return parameter.detach().full_tensor()
    if hasattr(parameter, "ds_id"):  # DeepSpeed's own gathering may round to 16 bits
        part = parameter.ds_tensor.detach().to(parameter.device)
        padded = part.new_empty(part.numel() * get_world_size(parameter.ds_process_group))
        all_gather_into_tensor(padded, part, parameter.ds_process_group)
        return padded[: parameter.ds_numel].view(parameter.ds_shape)
    return parameter.detach()


def set_whole(parameter: Any, value: Tensor) -> None:
    """Replace a parameter's values by unsharded ones, equal on every rank; all ranks must call this together."""
    if hasattr(parameter, "full_tensor"):
        parts = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        local_part(parameter).copy_(parts.to_local())
    elif hasattr(parameter, "ds_id"):
        local_part(parameter).copy_(rank_part(parameter, value, get_rank(parameter.ds_process_group)))
        if parameter.numel():  # a small weight, which stays gathered
            parameter.data.copy_(value)
    else:
        parameter.data.copy_(value)


def whole_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module with all-gathered parameters; all ranks must call this together."""
    copies: dict[int, Any] = {id(p): nn.Parameter(whole(p)) for p in module.parameters() if is_shard(p)}
    return copy.deepcopy(module, copies)
