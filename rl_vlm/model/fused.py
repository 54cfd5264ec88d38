"""Fused decoder layers: `torch.compile` joins their elementwise operators (norms, rotary angles, activations, casts).

Each layer is compiled alone, without its attention, whose kernels are compiled separately. Layers of one kind share
their graphs, and lengths are dynamic. So a model of any depth compiles a few graphs, in its first passes. See "Reducing
torch.compile cold start compilation time with regional compilation" in PyTorch's recipes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.model.compilation import allow_graphs
from rl_vlm.model.recomputation import is_vision, layers

if TYPE_CHECKING:
    from rl_vlm.model.policy import Policy

logger = logging.getLogger(__name__)


def fuse_layers(policy: Policy, config: RunConfig, shards_weights: bool) -> None:
    """Compile the decoder layers of a policy on its device, unless `model.fused` is `off`.

    Layers stay as they are on a CPU, with weights in 4 bits, if ranks gather the weights of each layer, if activations
    are offloaded, and in a memory profile, which looks into layers.
    """
    if config.model.fused == "off" or policy.device.type != "cuda":
        return
    kept = config.model.load_in_4bit or config.memory.activation_offloading or config.log.memory_profile
    if not (kept or shards_weights):
        logger.info("decoder layers are fused: the first passes compile them (model.fused)")
        compile_layers(policy)


def compile_layers(policy: Policy, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let the decoder layers of a policy be compiled when they are called first."""
    allow_graphs()
    for name, layer in layers(policy.transformer):
        if not is_vision(name, policy.family):
            layer.compile(dynamic=True, backend=backend)
