"""Selects the trained weights: all, all but the vision tower's, or the ones in `model.trainable_modules`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ConfigError
from rl_vlm.model.families import Family
from rl_vlm.model.lora import check_module_names, refuse_frozen_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARTS = ("lm_head", "language_model", "projector", "vision_tower")
"""Names for parts in `trainable_modules` that work in every family."""


def freeze_untrained(model: nn.Module, transformer: PreTrainedModel, family: Family, config: ModelConfig) -> None:
    """Freeze the weights that the settings do not train. `model` is `transformer`, or an adapter around it.

    Raises ConfigError if `trainable_modules` names a missing module, names only one of two modules that share a weight,
    or is set for an adapter. Raises it also if an adapter has layers in a vision tower that should be frozen.
    """
    if config.freeze_vision_tower:
        if model is not transformer:
            refuse_frozen_adapter(transformer, family.vision_prefixes)
        for parameter in family.vision_parameters(transformer):
            parameter.requires_grad_(False)
    if config.trainable_modules is None:
        return
    if model is not transformer:
        raise ConfigError(
            f"model.trainable_modules cannot be used with the adapter {config.model_name_or_path}, whose own weights "
            "are trained: leave it out, or merge the adapter into its base model first"
        )
    trained = trained_names(transformer, family, config.trainable_modules)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(name in trained)


def trained_names(model: PreTrainedModel, family: Family, wanted: list[str] | str) -> set[str]:
    """Return the names of the weights that `trainable_modules` selects. Raises ConfigError if it is invalid."""
    wanted = [wanted] if wanted in PARTS else wanted
    paths = [path for path, _ in model.named_modules()]
    check_module_names("trainable_modules", wanted, [*paths, *PARTS] if isinstance(wanted, list) else paths)
    patterns = name_patterns(model, family, wanted)
    uses: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(parameter, set()).add(name)
    trained = {name for names in uses.values() for name in names if any(re.fullmatch(p, name) for p in patterns)}
    if not trained:
        raise ConfigError(f"model.trainable_modules {wanted!r} selects modules that have no weights")
    for names in uses.values():
        if names & trained and (others := names - trained):
            other = min(others)
            raise ConfigError(
                f"model.trainable_modules selects {min(names & trained)} but not {other}. The model ties them, so they "
                f"are one weight: add {other.split('.')[-2]!r} to train both, or select neither"
            )
    return trained


def name_patterns(model: PreTrainedModel, family: Family, wanted: list[str] | str) -> list[str]:
    """Return regular expressions for the names of the selected weights: one per part or module, or the given one."""
    if isinstance(wanted, str):
        return [rf"({wanted})\..+"]
    vision, projector = (alternatives(names) for names in (family.vision_modules, family.projector_modules))
    head = model.get_output_embeddings()
    parts = {
        "lm_head": rf"{alternatives([path for path, module in model.named_modules() if module is head])}\..+",
        "language_model": rf"(?!{vision}(\.|$)).+",
        "projector": rf"{projector}(\..+)?",
        "vision_tower": rf"(?!{projector}\.){alternatives(family.vision_modules[:1])}\..+",
    }
    return [parts.get(name, rf"(.+\.)?{re.escape(name)}\..+") for name in wanted]


def alternatives(names: list[str] | tuple[str, ...]) -> str:
    """Return a regular expression for any of the names."""
    return f"({'|'.join(map(re.escape, names))})"
