"""Checks of LoRA settings against a model's modules, and against a checkpoint's adapter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ConfigError, did_you_mean, listed

MIN_TARGET_MODULES_FOR_OPTIMIZATION = 20
"""PEFT's constant. It shortens lists of at least this many names."""


def check_module_names(setting: str, value: list[str] | str | None, paths: Sequence[str]) -> None:
    """Raise ConfigError if a name, or the regular expression `value`, fits no module. The message lists close names."""
    lasts = {last for path in paths if not (last := path.rpartition(".")[2]).isdigit()} - {""}
    for name in value if isinstance(value, list) else []:
        if not any(f".{path}".endswith(f".{name}") for path in paths):
            raise ConfigError(
                f"model.{setting}: the model has no module {name!r}{did_you_mean(name, lasts)}; "
                f"modules by the last part of their names: {listed(lasts)}"
            )
    if isinstance(value, str) and value != "all-linear":
        try:
            fits = any(re.fullmatch(value, path) for path in paths)
        except re.error as error:
            raise ConfigError(f"model.{setting} {value!r} is not a regular expression: {error}") from error
        if not fits:
            raise ConfigError(
                f"model.{setting}: the regular expression {value!r} matches none of the model's modules, such as "
                f"{paths[-1]}; it must match a whole path (a list holds names)"
            )


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Return the modules that hold an adapter's weights, in addition to the model's own or instead of them, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)}


def refuse_frozen_adapter(transformer: nn.Module, vision_prefixes: tuple[str, ...]) -> None:
    """Raise ConfigError if an adapter has layers in the vision tower, which `freeze_vision_tower` would freeze.

    Policy and reference share the image features of a frozen tower, but an adapter's features differ from its base
    model's.
    """
    within = [name for name in adapter_layers(transformer) if f"{name}.".startswith(vision_prefixes)]
    if within:
        raise ConfigError(
            f"model.freeze_vision_tower cannot be used with an adapter inside the vision tower ({len(within)} layers, "
            f"such as {within[0]}): set it to false to train these layers. To keep a new adapter out of the tower, "
            "leave lora_exclude_modules out. If the adapter is in the checkpoint, merge it into its base model first"
        )


def check_adapter_settings(adapter: Any, config: ModelConfig, source: str) -> None:
    """Raise ConfigError if `use_peft` is on and the LoRA settings differ from the checkpoint's adapter."""
    own = {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha, "use_rslora": adapter.use_rslora}
    only_new = {
        "lora_target_modules": adapter.target_modules,
        "lora_exclude_modules": adapter.exclude_modules,
        "init_lora_weights": adapter.init_lora_weights,
    }
    own |= {name: value for name, value in only_new.items() if is_comparable(getattr(config, name), name)}
    for name, value in own.items():
        if config.use_peft and comparable(getattr(config, name)) != comparable(value):
            raise ConfigError(
                f"model.{name} is {getattr(config, name)}, but the adapter {source} has {value}: set it to that. Or "
                "set use_peft to false and leave LoRA settings out, to use the adapter unchanged"
            )


def is_comparable(value: Any, name: str) -> bool:
    """Return whether a setting differs from its default, and PEFT saves it unchanged."""
    shortened = isinstance(value, list) and len(value) >= MIN_TARGET_MODULES_FOR_OPTIMIZATION
    return value != ModelConfig.model_fields[name].default and not shortened


def comparable(value: Any) -> Any:
    """Convert module names to a set, as PEFT saves them. Return anything else unchanged."""
    return set(value) if isinstance(value, list | set) else value
