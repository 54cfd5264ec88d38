"""The modules that get an adapter; checks of LoRA settings against a model's modules and a checkpoint's adapter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from rl_vlm.config.parts import PARTS, as_names
from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ConfigError, did_you_mean, listed
from rl_vlm.model.family import Family
from rl_vlm.model.parts import linear_layers

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

MIN_TARGET_MODULES_FOR_OPTIMIZATION = 20
"""PEFT's constant. It shortens lists of at least this many names."""


def adapter_targets(model: PreTrainedModel, family: Family, modules: list[str] | str) -> list[str] | str:
    """Return PEFT's `target_modules`: the linear layers of the parts that `lora_target_modules` names, and its others.

    Raises ConfigError if a part has no linear layer.
    """
    names = as_names(modules)
    if isinstance(names, str):
        return names
    found = [linear_layers(model, family, name) if name in PARTS else [name] for name in names]
    return list(dict.fromkeys(name for layers in found for name in layers))


def targeted_layers(model: nn.Module, adapter: LoraConfig) -> set[str]:
    """Return the paths of the modules to which PEFT would add this adapter, which names modules."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return {path for path, _ in model.named_modules() if check_target_module_exists(adapter, path)}


def check_module_names(
    setting: str, value: list[str] | str | None, paths: Sequence[str], parts: Sequence[str] = ()
) -> None:
    """Raise ConfigError if a name, or the regular expression `value`, fits no module. The message lists close names.

    In a list, names of `parts` are allowed as well.
    """
    lasts = {last for path in paths if not (last := path.rpartition(".")[2]).isdigit()} - {""}
    for name in value if isinstance(value, list) else []:
        if name not in parts and not any(f".{path}".endswith(f".{name}") for path in paths):
            raise ConfigError(
                f"model.{setting}: the model has no module {name!r}{did_you_mean(name, lasts | set(parts))}; "
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


def adapts_tied_weight(model: PreTrainedModel) -> bool:
    """Return whether a model ties its LM head to its embeddings, and an adapter is on one of them.

    The adapter changes only the output of its own module. Merged into the weight, it would change both outputs.
    """
    modules: list[Any] = [model.get_output_embeddings(), model.get_input_embeddings()]
    is_tied = modules[0] is not None and modules[0].weight is modules[1].weight
    return is_tied and any(hasattr(module, "get_base_layer") for module in modules)


def untie_head(model: PreTrainedModel) -> None:
    """Give a tied LM head a copy of the embeddings' weight, and set `tie_word_embeddings` to False in the config."""
    head: Any = model.get_output_embeddings()
    base = head.get_base_layer() if hasattr(head, "get_base_layer") else head
    base.weight = nn.Parameter(base.weight.detach().clone())
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = False


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
            "leave lora_exclude_modules out and name no part of the tower in lora_target_modules. If the adapter is in "
            "the checkpoint, merge it into its base model first"
        )


def check_adapter_settings(model: PeftModel, config: ModelConfig, source: str, wanted: set[str] | None) -> None:
    """Raise ConfigError if `use_peft` is on and the LoRA settings differ from the checkpoint's adapter.

    `wanted` are the paths of the modules of the parts in `lora_target_modules`, or None if it names no part.
    """
    adapter: Any = model.peft_config["default"]
    own = {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha, "use_rslora": adapter.use_rslora}
    only_new = {
        "lora_target_modules": adapter.target_modules,
        "lora_exclude_modules": adapter.exclude_modules,
        "init_lora_weights": adapter.init_lora_weights,
    }
    if wanted is not None:
        refuse_other_layers(model, config, source, wanted)
        del only_new["lora_target_modules"]
    own |= {name: value for name, value in only_new.items() if is_comparable(getattr(config, name), name)}
    for name, value in own.items():
        if config.use_peft and comparable(getattr(config, name)) != comparable(value):
            raise ConfigError(
                f"model.{name} is {getattr(config, name)}, but the adapter {source} has {value}: set it to that. Or "
                "set use_peft to false and leave LoRA settings out, to use the adapter unchanged"
            )


def refuse_other_layers(model: PeftModel, config: ModelConfig, source: str, wanted: set[str]) -> None:
    """Raise ConfigError if the checkpoint's adapter is on other modules than the settings name."""
    differing = wanted ^ set(adapter_layers(model.get_base_model()))
    if differing:
        raise ConfigError(
            f"model.lora_target_modules is {config.lora_target_modules}, but the adapter {source} is on other modules "
            f"({len(differing)}, such as {min(differing)}): name its modules. Or set use_peft to false and leave LoRA "
            "settings out, to use the adapter unchanged"
        )


def is_comparable(value: Any, name: str) -> bool:
    """Return whether a setting differs from its default, and PEFT saves it unchanged."""
    shortened = isinstance(value, list) and len(value) >= MIN_TARGET_MODULES_FOR_OPTIMIZATION
    return value != ModelConfig.model_fields[name].default and not shortened


def comparable(value: Any) -> Any:
    """Convert module names to a set, as PEFT saves them. Return anything else unchanged."""
    return set(value) if isinstance(value, list | set) else value
