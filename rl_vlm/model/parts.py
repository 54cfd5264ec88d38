"""The parts of a model that settings name: which weights and which linear layers belong to each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from rl_vlm.errors import ConfigError
from rl_vlm.model.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def part_patterns(model: PreTrainedModel, family: Family) -> dict[str, str]:
    """Return a regular expression for the names of each part's weights.

    The LM head is a part, and belongs to the language model as well.
    """
    vision, projector = (alternatives(names) for names in (family.vision_modules, family.projector_modules))
    return {
        "lm_head": rf"{alternatives(head_paths(model))}\..+",
        "language_model": rf"(?!{vision}(\.|$)).+",
        "projector": rf"{projector}(\..+)?",
        "vision_tower": rf"(?!{projector}\.){alternatives(family.tower_modules)}\..+",
    }


def linear_layers(model: PreTrainedModel, family: Family, part: str) -> list[str]:
    """Return the paths of the part's linear layers. The LM head does not belong to the language model.

    These are the modules of this part that PEFT's `all-linear` selects, and the head if it is named. Raises ConfigError
    if there are none.
    """
    pattern, heads = part_patterns(model, family)[part], head_paths(model)
    found = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and re.fullmatch(pattern, f"{path}.weight")
        and family.has_gradient(path)
        and (part == "lm_head" or path not in heads)
    ]
    if not found:
        raise ConfigError(
            f"model.lora_target_modules: the {part} of {family.model_type} has no linear layers, so it can get no "
            "adapter: leave it out, or train its weights with trainable_modules instead of use_peft"
        )
    return found


def head_paths(model: PreTrainedModel) -> list[str]:
    """Return the path of the LM head."""
    head = model.get_output_embeddings()
    return [path for path, module in model.named_modules() if module is head]


def alternatives(names: Iterable[str]) -> str:
    """Return a regular expression for any of the names."""
    return f"({'|'.join(map(re.escape, names))})"
