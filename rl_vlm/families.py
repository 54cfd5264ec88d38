"""What the system knows of each model family: one row a family, dispatched on `config.model_type`.

Everything else treats a model's image inputs as the model's own keyword dict and stays blind to families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from rl_vlm.errors import ModelError
from rl_vlm.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_positions: WeakKeyDictionary[Prompt, Tensor] = WeakKeyDictionary()


def mrope_positions(model: PreTrainedModel, prompt: Prompt) -> Int[Tensor, "3 prompt_tokens"]:
    """3-D M-RoPE positions (time, height, width) of a prompt's tokens (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Computed once per prompt: rollout, old, reference and training passes all ask for them.
    """
    if prompt not in _positions:
        positions, _ = model.model.get_rope_index(
            prompt.token_ids[None],
            prompt.token_inputs["mm_token_type_ids"][None],
            image_grid_thw=prompt.mm_inputs.get("image_grid_thw"),
        )
        _positions[prompt] = positions[:, 0]
    return _positions[prompt]


@dataclass(frozen=True)
class Family:
    """One model family."""

    model_type: str
    prompt_positions: Callable[[PreTrainedModel, Prompt], Int[Tensor, "axes prompt_tokens"]]
    """Position ids of a prompt; each completion goes on at their maximum + 1, on every axis."""
    vision_modules: tuple[str, ...]
    """Names, from the model's root, of the vision tower and its projector."""
    placeholder_attributes: tuple[str, ...] = ("image_token_id", "video_token_id")
    """Config attributes that hold the ids of placeholder tokens, which the policy must never sample."""

    def banned_token_ids(self, config: PreTrainedConfig) -> list[int]:
        """Placeholder tokens: a completion that contained one could not be scored again."""
        return sorted({getattr(config, name) for name in self.placeholder_attributes})

    def vision_parameters(self, model: PreTrainedModel) -> list[torch.nn.Parameter]:
        """Parameters of the vision tower and projector."""
        return [p for name in self.vision_modules for p in model.get_submodule(name).parameters()]


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen2_vl", mrope_positions, vision_modules=("model.visual",)),
        Family("qwen2_5_vl", mrope_positions, vision_modules=("model.visual",)),
        Family("qwen3_vl", mrope_positions, vision_modules=("model.visual",)),
        Family("qwen3_vl_moe", mrope_positions, vision_modules=("model.visual",)),
    )
}


def family_of(config: PreTrainedConfig) -> Family:
    """The row for a model's config. Raises ModelError for a family that is not in the table."""
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"model_type {config.model_type!r} is not supported; supported families: {', '.join(sorted(FAMILIES))}. "
            "A family must be checked before it shares prefixes, or its log-probs may be silently wrong."
        )
    return FAMILIES[config.model_type]


def stop_token_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Tokens that end a completion: the tokenizer's EOS and those that the checkpoint names.

    Chat models often end a turn with another token than the tokenizer's EOS. Nothing else of the checkpoint's
    generation config is used.
    """
    named = model.generation_config.eos_token_id
    named = named if isinstance(named, list) else [named]
    return sorted({token for token in [tokenizer.eos_token_id, *named] if token is not None})
