"""Probes of a model's gradients that do not depend on how completions are laid out in rows.

One vector is added to the embedding of each token. Its gradient is a sum over all tokens, and it passes through every
layer. So a prompt that is computed once has the same gradient as copies of it. A few trained weights are probed as
well. No weight keeps a gradient, and no rank waits for the gradients of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_vlm.model.family import Family

IN_LAYER = re.compile(r".*?\.\d+\.")
"""Name of the outermost numbered module that a weight is in."""


def weights_behind(output: Tensor) -> set[int]:
    """Return the `id`s of the leaves that a tensor's graph has a gradient for."""
    found, seen, nodes = set[int](), set[Any](), [output.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [each for each, _ in node.next_functions]
    return found


def probed_weights(model: nn.Module, family: Family) -> dict[str, nn.Parameter]:
    """Return up to three trained matrices by name: one each from the first and the last layer, and a `lora_A`.

    Layers are the language model's if any of them is trained. A layer's matrix is `lora_B` if it has an adapter,
    because the gradient of a new adapter's `lora_A` is 0.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2}
    layers = {name: found.group() for name in trained if (found := IN_LAYER.match(name))}
    of_text = {name: layer for name, layer in layers.items() if not name.startswith(family.vision_prefixes)}
    layers = of_text or layers
    inner = [name for name in layers if "lora_A" in name]
    others = [name for name in layers if name not in inner]
    of_last = [name for name in others if layers[name] == layers[others[-1]]]
    return {name: trained[name] for name in (*others[:1], *of_last[:1], *inner[-1:])}


@contextmanager
def probed_embeddings(model: Any, rounding: float = 0.0) -> Iterator[Tensor]:
    """Add a vector of zeros to all embeddings in the context, and yield it.

    The vector has shape (hidden,) and requires a gradient. Embeddings are also multiplied by 1 + `rounding` or by
    1 - `rounding`, in turn along their values.
    """
    embeddings: nn.Module = model.get_input_embeddings()
    size = model.config.get_text_config().hidden_size
    probe = torch.zeros(size, device=model.device, requires_grad=True)
    factors = 1 + rounding * (1 - 2 * (torch.arange(size, device=model.device) % 2))

    def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * factors.to(output.dtype) + probe.to(output.dtype)

    handle = embeddings.register_forward_hook(add)
    try:
        yield probe
    finally:
        handle.remove()
