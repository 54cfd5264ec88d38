"""What `accelerate launch` asks for, read from the environment variables that it sets."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_vlm.errors import LaunchError

FSDP_DEFAULTS = {
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": "100000000",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
    "fsdp_sharding_strategy": "FULL_SHARD",
}
"""Keys of `fsdp_config` that are not read, with the only value that is accepted: it describes what FSDP2 does here."""
READ_BY_FSDP2 = ("fsdp_version", "fsdp_reshard_after_forward", "fsdp_transformer_cls_to_wrap")


@dataclass(frozen=True)
class Launch:
    """The launcher's request."""

    kind: Literal["ddp", "deepspeed", "fsdp2"]
    mixed_precision: str = "no"
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """The DeepSpeed config: a user's JSON, or what accelerate makes of `deepspeed_config` in its own file."""
    reshard_after_forward: bool = True
    """Whether FSDP2 frees a layer's weights after its forward and gathers them again for its backward."""
    layers: tuple[str, ...] = ()
    """Classes of the layers that FSDP2 shards one by one; by default those that the model names."""


def take_launch() -> Launch:
    """Return the launcher's request, and remove it from the environment.

    accelerate then joins the processes as for DDP, and the strategies of this package shard the model. Raises
    LaunchError if something is asked for that would have no effect.
    """
    mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    refuse_other_engines()
    if _take("ACCELERATE_USE_DEEPSPEED"):
        return Launch("deepspeed", mixed_precision, deepspeed=_deepspeed_config())
    if _take("ACCELERATE_USE_FSDP"):
        check_fsdp()
        reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
        layers = tuple(filter(None, os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").replace(" ", "").split(",")))
        return Launch("fsdp2", mixed_precision, reshard_after_forward=reshard, layers=layers)
    return Launch("ddp", mixed_precision)


def _take(name: str) -> bool:
    return os.environ.pop(name, "false").lower() in ("1", "true")


def refuse_other_engines() -> None:
    """Raise LaunchError if the launcher asks for tensor parallelism, Megatron-LM or torch.compile."""
    for name, setting in (
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "parallelism_config (tensor, context or sequence parallelism)"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    ):
        if os.environ.get(name, "false").lower() in ("1", "true"):
            raise LaunchError(
                f"the launcher asks for {setting}, which rl-vlm does not train with. If the model does not fit on one "
                "device, use launch/accelerate/zero3.yaml or launch/accelerate/fsdp2.yaml."
            )
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() not in ("NO", ""):
        raise LaunchError("the launcher's dynamo_backend is not used; set it to no")


def check_fsdp() -> None:
    """Raise LaunchError if `fsdp_config` sets something that FSDP2 does not do here."""
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise LaunchError("fsdp_config.fsdp_version must be 2, as in launch/accelerate/fsdp2.yaml")
    for key, accepted in FSDP_DEFAULTS.items():
        value = os.environ.get(key.upper())
        if value not in (None, "None", "") and value.lower() != accepted.lower():
            raise LaunchError(
                f"fsdp_config.{key} {value} is not supported, only {accepted}; remove it. Keys that are read: "
                f"{', '.join(READ_BY_FSDP2)}. Gradient checkpointing is memory.gradient_checkpointing. To keep "
                "optimizer state or weights in host memory, use launch/accelerate/zero3_offload.yaml."
            )


def _deepspeed_config() -> dict[str, Any]:
    """Return the DeepSpeed config. Raises LaunchError if the file cannot be read or accelerate refuses it."""
    from accelerate import DeepSpeedPlugin

    try:
        config = dict(DeepSpeedPlugin(zero3_init_flag=False).deepspeed_config)
    except (ValueError, OSError) as error:
        raise LaunchError(f"the DeepSpeed config cannot be used: {error}") from error
    if "gradient_accumulation_steps" not in _named_fields():
        config["gradient_accumulation_steps"] = "auto"  # 1 is accelerate's default
    return config


def _named_fields() -> list[str]:
    """Return the fields that a user's JSON sets, or accelerate's own file."""
    file = Path(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"))
    if file.is_file():
        return list(json.loads(file.read_text()))
    return os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
