"""Settings that come as Python objects: fields of TRL's GRPOConfig, PEFT's LoraConfig, paths, precisions."""

from __future__ import annotations

import dataclasses
import os
from enum import Enum
from typing import Any

from rl_vlm.config.parts import named_parts
from rl_vlm.errors import ConfigError

PRECISIONS = ("bf16", "fp16")
"""Fields whose defaults TRL refuses on some hardware."""
COMPUTED = ("generation_batch_size", "do_eval")
"""Fields that TRL computes from `steps_per_generation` and `eval_strategy`, if they are not set."""
HUB = ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision", "hub_token", "hub_strategy")
"""Fields that are no settings of a run: the trainer reads them, and pushes after the run."""

LORA = {
    "r": "model.lora_r", "lora_alpha": "model.lora_alpha", "target_modules": "model.lora_target_modules",
    "exclude_modules": "model.lora_exclude_modules", "init_lora_weights": "model.init_lora_weights",
    "use_rslora": "model.use_rslora",
}  # fmt: skip
"""Fields of LoraConfig that are settings here."""
NO_SETTINGS = ("auto_mapping", "base_model_name_or_path", "megatron_core", "peft_version", "qalora_group_size")
"""Fields of LoraConfig that change nothing for a new adapter, or nothing without other fields."""
TRL_DROPOUT = 0.05
"""Default of `lora_dropout` in TRL's ModelConfig. `get_peft_config` passes it to LoraConfig."""


def is_trl_object(args: Any) -> bool:
    """Return whether `args` is a GRPOConfig, or an object like it."""
    return dataclasses.is_dataclass(args) and hasattr(args, "steps_per_generation")


def given_fields(args: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, and always `output_dir` and the precisions.

    `use_cpu` is left out on a machine without a CUDA device.
    """
    import torch

    always = ("output_dir", *PRECISIONS)
    empty = type(args)(use_cpu=args.use_cpu, **{name: getattr(args, name) for name in PRECISIONS})
    names = [field.name for field in dataclasses.fields(args) if field.init and field.name not in (*COMPUTED, *HUB)]
    given = {n: getattr(args, n) for n in names if n in always or getattr(args, n) != getattr(empty, n)}
    if args.steps_per_generation == args.gradient_accumulation_steps:  # the default, which TRL fills in
        given.pop("steps_per_generation", None)
    if args.use_cpu and torch.cuda.is_available():
        given["use_cpu"] = True  # refused by trl_refused.py
    return given


def hub_fields(args: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the fields about the hub of a GRPOConfig or a dict, and of keywords, which take precedence."""
    of_args = vars(args) if is_trl_object(args) else args if isinstance(args, dict) else {}
    return {name: given[name] for given in (of_args, keywords) for name in HUB if name in given}


def without_hub(args: Any) -> Any:
    """Return `args` without fields about the hub if it is a dict."""
    return {name: value for name, value in args.items() if name not in HUB} if isinstance(args, dict) else args


def plain(value: Any) -> Any:
    """Convert a path, a member of an enum or a PyTorch precision to text. Return anything else unchanged."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value.value if isinstance(value, Enum) else value


def lora_settings(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Convert a LoraConfig of PEFT to settings by full name, and to a sentence for each default that differs here.

    Raises ConfigError that names every field without an equivalent.
    """
    if not dataclasses.is_dataclass(config) or plain(getattr(config, "peft_type", None)) != "LORA":
        raise ConfigError(f"peft_config is a {type(config).__name__}: give a LoraConfig of PEFT, or use_peft=True")
    fields = {field.name: field for field in dataclasses.fields(config) if field.init}
    values = {name: getattr(config, name) for name in fields}
    accepted = {"task_type": (None, "CAUSAL_LM"), "lora_dropout": (0.0, TRL_DROPOUT), "peft_type": ("LORA", None)}
    refused = [
        f"`{name}` {value!r}"
        for name, field in fields.items()
        if name not in LORA and name not in NO_SETTINGS
        and (value := plain(values[name])) not in accepted.get(name, (default_of(field),))
    ]  # fmt: skip
    if refused:
        raise ConfigError(
            f"peft_config has {', '.join(refused)}, which adapters here do not have: leave them out. The fields that "
            f"count are {', '.join(LORA)}"
        )
    settings: dict[str, Any] = {"model.use_peft": True}
    for name, setting in LORA.items():
        value = values[name]
        if value is not None:
            settings[setting] = sorted(value) if isinstance(value, set | frozenset) else value
    return settings, different_defaults(values)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass's field."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def different_defaults(values: dict[str, Any]) -> list[str]:
    """Return a sentence for each default of a LoraConfig with these values that has another effect here."""
    notes = []
    if values["lora_dropout"]:
        notes.append(f"`lora_dropout` {values['lora_dropout']} is left out: here adapters have none")
    if values["target_modules"] is None:
        notes.append("`target_modules` is PEFT's choice in TRL; here all linear layers of the language model")
    elif values["exclude_modules"] is None and not named_parts(list(values["target_modules"])):
        notes.append("the vision tower and its projector get no adapter, unless `lora_exclude_modules=[]` is given")
    return notes
