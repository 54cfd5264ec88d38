"""A model's weights, block by block. If ranks hold shards, one block is gathered and converted at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from rl_vlm.distributed.shards import whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NamedWeights = list[tuple[str, Tensor]]


def by_block(weights: Iterable[tuple[str, Tensor]]) -> Iterator[NamedWeights]:
    """Yield the weights of each block, such as a layer. Neighbours outside of any layer also form a block.

    A tensor in checkpoints can join several of a model's weights. They are always in one block.
    """
    for _, block in groupby(weights, key=lambda named: block_of(named[0])):
        yield list(block)


def untied(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once, under the first of its names."""
    seen = WeakTensorKeyDictionary()  # weak, since the addresses of freed merged copies are reused
    for name, weight in weights:
        if weight not in seen:
            seen[weight] = name
            yield name, weight


def block_of(name: str) -> str:
    """Return the prefix up to the first number, or "": `model.layers.3.` of `model.layers.3.mlp.up_proj.weight`."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


def as_in_checkpoints(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert unsharded weights to the names and layouts of the checkpoint that the model was loaded from.

    transformers looks at the shapes of the model's own weights. If DeepSpeed shards them, these are empty, and
    transformers would transpose experts.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own_parameter = model.get_parameter
    inner: Any = model
    inner.get_parameter = lambda name: torch.empty(whole_shape(own_parameter(name)), device="meta")
    try:
        return revert_weight_conversion(model, weights)
    finally:
        del inner.get_parameter


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that checkpoints hold, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
