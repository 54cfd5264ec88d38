"""Gradient checkpointing of the whole model, of its vision tower or of its language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from rl_vlm.config.schema import MemoryConfig
from rl_vlm.errors import ConfigError
from rl_vlm.model.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ModelPart = Literal["vision_tower", "language_model"]


def enable_recomputation(model: PreTrainedModel, family: Family, memory: MemoryConfig) -> None:
    """Recompute activations of a part, or of all layers, in the backward pass, as `gradient_checkpointing` says.

    Call this after `requires_grad` of all weights is set. Raises ConfigError if the model's code cannot recompute, if
    only a frozen vision tower would be recomputed, or if no layer of the part can be recomputed.
    """
    part = memory.gradient_checkpointing
    if not part:
        return
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"memory.gradient_checkpointing: {str(part).lower()} is not possible: {type(model).__name__}, the model's "
            "code, does not support it. Set it to false. memory.activation_offloading: true needs less GPU memory as "
            "well, and so does model.use_peft: true"
        )
    if part == "vision_tower" and not trains_tower(model, family):
        raise ConfigError(
            "memory.gradient_checkpointing: vision_tower has no effect, because no weight of the vision tower is "
            "trained: it keeps no activations. Leave it out, or use language_model"
        )
    if part is not True:
        require_layers(model, family, part)
    # Without dropout no layer draws random numbers, but a reward function may draw some meanwhile.
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.disable_input_require_grads()  # only reentrant checkpointing needs them; they would reach a frozen tower
    for name, module in checkpointed(model):
        module.gradient_checkpointing = part is True or is_vision(name, family) == (part == "vision_tower")
    of_text = [layer for name, layer in layers(model) if not is_vision(name, family)]
    if of_text and keeps_last_layer(model, memory):
        of_text[-1].gradient_checkpointing = False


def keeps_last_layer(model: PreTrainedModel, memory: MemoryConfig) -> bool:
    """Return whether the last layer of the language model keeps its activations. The backward begins with them.

    They then lie in memory while the LM head is computed. If the head is trained, that is the peak, and they would add
    to it. With offloading they would move to host memory and straight back.
    """
    head: Any = model.get_output_embeddings()
    return not memory.activation_offloading and not any(p.requires_grad for p in head.parameters())


def require_layers(model: nn.Module, family: Family, part: ModelPart) -> None:
    """Raise ConfigError if no layer of `part` can recompute its activations."""
    parts = ["vision_tower" if is_vision(name, family) else "language_model" for name, _ in layers(model)]
    if part not in parts:
        others = f"set {parts[0]}, or " if parts else ""
        raise ConfigError(
            f"memory.gradient_checkpointing: {part} has no effect: no layer of that part in transformers' "
            f"{family.model_type} can recompute its activations; {others}leave it out"
        )


def recomputes_vision(model: nn.Module, family: Family) -> bool:
    """Return whether the backward pass recomputes the vision tower. It does not reach a frozen tower."""
    is_on = any(is_vision(name, family) and layer.gradient_checkpointing for name, layer in layers(model))
    return is_on and trains_tower(model, family)


def trains_tower(model: nn.Module, family: Family) -> bool:
    """Return whether a weight of the vision tower is trained. The projector does not count."""
    projector = tuple(f"{name}." for name in family.projector_modules)
    return any(
        p.requires_grad and is_vision(name, family) and not name.startswith(projector)
        for name, p in model.named_parameters()
    )


def layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers that can recompute their activations, by name."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [(name, module) for name, module in checkpointed(model) if isinstance(module, GradientCheckpointingLayer)]


def checkpointed(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules with a switch for recomputation, by name. A switch that only a model or encoder has is without
    effect."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "gradient_checkpointing")]


def is_vision(name: str, family: Family) -> bool:
    return f"{name}.".startswith(family.vision_prefixes)
