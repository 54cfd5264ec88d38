"""Selects the trained weights: all, all but the vision tower's, or the ones in `model.trainable_modules`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from rl_vlm.config.parts import PARTS, as_names
from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ConfigError
from rl_vlm.model.family import Family
from rl_vlm.model.lora import check_module_names, refuse_frozen_adapter
from rl_vlm.model.parts import part_patterns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def freeze_untrained(model: nn.Module, transformer: PreTrainedModel, family: Family, config: ModelConfig) -> None:
    """Freeze the weights that the settings do not train. `model` is `transformer`, or an adapter around it.

    Raises ConfigError if `trainable_modules` names a missing module, names only one of two modules that share a weight,
    or is set for an adapter. Raises it also if an adapter has layers in a vision tower that should be frozen.
    """
    freeze_unselected(model, transformer, family, config)
    for name, parameter in transformer.named_parameters():
        if not family.has_gradient(name):
            parameter.requires_grad_(False)


def freeze_unselected(model: nn.Module, transformer: PreTrainedModel, family: Family, config: ModelConfig) -> None:
    """Freeze the weights that `freeze_vision_tower` and `trainable_modules` do not train."""
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
    wanted = as_names(wanted)
    paths = [path for path, _ in model.named_modules()]
    check_module_names("trainable_modules", wanted, paths, PARTS)
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
    parts = part_patterns(model, family)
    return [parts.get(name, rf"(.+\.)?{re.escape(name)}\..+") for name in wanted]
