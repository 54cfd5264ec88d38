"""The layers of a model. They are sharded one after the other, so that no rank ever holds the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.setup import UNSHARDED_WEIGHTS
from rl_vlm.distributed.shards import is_shard
from rl_vlm.errors import LaunchError, listed


def parameters_without_storage() -> AbstractContextManager[None]:
    """Create models in this context with parameters on the meta device; buffers have their values."""
    from accelerate import init_empty_weights

    return init_empty_weights(include_buffers=False)


def layers_of(policy: Any, classes: Sequence[str] = ()) -> list[nn.Module]:
    """Return the repeated layers of a policy's model, inner ones first.

    `classes` are the names of their classes. By default these are `_no_split_modules`, which transformers keeps on one
    device. Raises LaunchError if the model has no such layer, or none of a class in `classes`.
    """
    names = set(classes or policy.transformer._no_split_modules or ())
    found = [module for module in policy.modules() if type(module).__name__ in names]
    if unknown := set(classes) - {type(module).__name__ for module in found}:
        lists = [module for module in policy.modules() if isinstance(module, nn.ModuleList)]
        raise LaunchError(
            f"fsdp_config.fsdp_transformer_layer_cls_to_wrap names {listed(unknown)}, which the model does not have. "
            f"It has layers of {listed({type(layer).__name__ for layers in lists for layer in layers})}. Without the "
            f"key, fsdp2 shards the model's _no_split_modules: {listed(policy.transformer._no_split_modules or ())}"
        )
    if not found:
        raise LaunchError(
            f"{type(policy.transformer).__name__} cannot be sharded layer by layer: it has no layer of the classes in "
            f"its _no_split_modules ({listed(names)}). With fsdp2, set fsdp_config.fsdp_transformer_layer_cls_to_wrap "
            f"to the classes of its layers; or {UNSHARDED_WEIGHTS}"
        )
    return found[::-1]


@torch.no_grad()
def receive_weights(module: nn.Module, ranks: Collectives) -> None:
    """Broadcast a module's buffers and unsharded weights from rank 0 to the devices of all ranks.

    Other ranks may hold the weights without storage, on the meta device.
    """
    sent: dict[nn.Parameter, nn.Parameter] = {}  # tied weights are one parameter in several modules
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(ranks.device))
            ranks.broadcast(getattr(part, name))
        for name, parameter in part.named_parameters(recurse=False):
            if not is_shard(parameter):
                if parameter not in sent:
                    sent[parameter] = received(parameter, ranks)
                setattr(part, name, sent[parameter])


def received(parameter: nn.Parameter, ranks: Collectives) -> nn.Parameter:
    """Return a parameter with rank 0's values on this rank's device. Other ranks may pass it without storage."""
    if parameter.is_meta:
        empty = torch.empty_like(parameter, device=ranks.device)
        parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    else:
        parameter.data = parameter.data.to(ranks.device)
    ranks.broadcast(parameter.data)
    return parameter
