"""The request of `accelerate launch`, read from the environment variables that it sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rl_vlm.config import json_text
from rl_vlm.distributed.launcher import SET_BY_LAUNCHERS
from rl_vlm.distributed.shardings import PLAIN, SHARDINGS, Kind, Sharding, kinds
from rl_vlm.errors import LaunchError

FSDP_KEYS: dict[str, list[str]] = {
    "fsdp_offload_params": ["false"],
    "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP"],
    "fsdp_min_num_params": ["100000000", "0"],
    "fsdp_activation_checkpointing": ["false"],
    "fsdp_activation_checkpointing_offload": ["false"],
    "fsdp_cpu_ram_efficient_loading": ["true"],
    "fsdp_sync_module_states": ["true"],
    "fsdp_state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
    "fsdp_sharding_strategy": ["FULL_SHARD", "1"],
    "fsdp_forward_prefetch": ["false"],
    "fsdp_backward_prefetch": ["BACKWARD_PRE"],
    "fsdp_use_orig_params": ["true"],
    "fsdp_ignored_modules": [],
}
"""Keys of `fsdp_config` that are not read, with their accepted values: these describe how FSDP2 runs anyway."""
READ_BY_FSDP2 = "fsdp_version, fsdp_reshard_after_forward, fsdp_transformer_layer_cls_to_wrap"
NOT_SUPPORTED = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config (tensor, context or sequence parallelism)",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
AUTO_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Sizes in `zero_optimization` that depend on the model's width if they are `auto`."""
DEEPSPEED_OPTIONS = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_optimization.stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "zero_optimization.offload_optimizer.device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "zero_optimization.offload_param.device",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}
"""Options of `accelerate launch` and of `deepspeed_config` in its files, with their keys in a DeepSpeed config."""


@dataclass(frozen=True)
class Launch:
    """The launcher's request."""

    kind: str
    """Name of a kind of sharding in rl_vlm/distributed/shardings.py."""
    mixed_precision: str = "no"
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """The DeepSpeed config: the user's JSON file, merged with `deepspeed_config` of accelerate's file."""
    reshard_after_forward: bool = True
    """Whether FSDP2 frees a layer's weights after its forward and gathers them again for its backward."""
    layers: tuple[str, ...] = ()
    """Classes of the layers that FSDP2 shards one by one; by default the classes that the model names."""

    @property
    def facts(self) -> Kind:
        """Return the facts that all shardings of its kind share."""
        return kinds()[self.kind]

    @property
    def sharding(self) -> Sharding:
        """Return the row of the sharding. Raise an error if the launcher's config is not supported."""
        if self.facts.sharding is not None:
            return resolve_name(self.facts.sharding)(self)
        return next(row for row in SHARDINGS.values() if row.kind is self.facts)

    def check(self) -> None:
        """Raise LaunchError if the sharding's package is installed and cannot read its config. It may import torch."""
        if self.facts.check is not None:
            resolve_name(self.facts.check)(self)


def read_launch() -> Launch:
    """Return the launcher's request. Raises LaunchError if the launcher asks for something without effect."""
    refuse_unsupported()
    asked = (kind for kind in kinds().values() if kind.variable is not None and _is_true(kind.variable))
    kind = next(asked, PLAIN)
    return resolve_name(kind.launch)(kind.name, os.environ)


def take_launch() -> Launch:
    """Return the launcher's request, and remove it from the environment.

    accelerate then joins the processes as for DDP, and the strategies of this package shard the model. Raises
    LaunchError if the launcher asks for something without effect.
    """
    launch = read_launch()
    for name in request_variables():
        os.environ.pop(name, None)
    return launch


def is_launched() -> bool:
    """Return whether a launcher has started this process, or its variables ask for a sharding."""
    return any(name in os.environ for name in (*SET_BY_LAUNCHERS, "WORLD_SIZE", *request_variables()))


def request_variables() -> list[str]:
    """Return the variables by which launchers ask for a kind of sharding."""
    return [kind.variable for kind in kinds().values() if kind.variable is not None]


def plain_launch(kind: str, environment: Mapping[str, str]) -> Launch:
    """Build a launch without options."""
    return Launch(kind, _mixed_precision(environment))


def deepspeed_launch(kind: str, environment: Mapping[str, str]) -> Launch:
    """Build a launch with DeepSpeed's config. Raise LaunchError if the config cannot be read."""
    return Launch(kind, _mixed_precision(environment), deepspeed=deepspeed_config(environment))


def fsdp2_launch(kind: str, environment: Mapping[str, str]) -> Launch:
    """Build a launch with the options of FSDP2. Raise LaunchError if one of them is not supported."""
    check_fsdp(environment)
    reshard = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
    layers = tuple(filter(None, environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").replace(" ", "").split(",")))
    return Launch(kind, _mixed_precision(environment), reshard_after_forward=reshard, layers=layers)


def _mixed_precision(environment: Mapping[str, str]) -> str:
    return environment.get("ACCELERATE_MIXED_PRECISION", "no")


def check_evaluation_launch(launch: Launch, dtype: str | None) -> None:
    """Raise LaunchError if the launcher asks for another precision, or to shard the model by DeepSpeed or FSDP."""
    check_precision(launch.mixed_precision, dtype)
    if launch.facts.shards_state:
        raise LaunchError(
            "the launcher asks for DeepSpeed or FSDP, but an evaluation does not shard the model: use "
            "launch/accelerate/ddp.yaml. To spread a model over several devices, serve it, or set rollout.engine to "
            "vllm and vllm_tensor_parallel_size."
        )


def check_precision(mixed_precision: str, dtype: str | None) -> None:
    """Raise LaunchError if the launcher's mixed precision contradicts `model.dtype`.

    If that is not set yet, it is float32 or bfloat16.
    """
    if mixed_precision not in ("no", {"bfloat16": "bf16", "float32": "no", None: "bf16"}[dtype]):
        raise LaunchError(
            f"the launcher asks for mixed_precision {mixed_precision}, but model.dtype is {dtype or 'not set'}: set "
            'mixed_precision to "no", and choose the precision with model.dtype (float32 or bfloat16)'
        )


@contextmanager
def kept_request() -> Iterator[None]:
    """Restore the launcher's request after the block, in which `take_launch` removes it."""
    request = {name: os.environ[name] for name in request_variables() if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(request)


def _is_true(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true")


def refuse_unsupported() -> None:
    """Raise LaunchError if the launcher asks for tensor parallelism, Megatron-LM or torch.compile."""
    for name, setting in NOT_SUPPORTED.items():
        if _is_true(name):
            raise LaunchError(
                f"the launcher asks for {setting}, which rl-vlm does not train with. If the model does not fit on one "
                "device, use launch/accelerate/zero3.yaml or launch/accelerate/fsdp2.yaml."
            )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in ("no", ""):
        raise LaunchError(f"the launcher's dynamo_backend is {backend.lower()}, which is not used: set it to no")


def check_fsdp(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if `fsdp_config` sets an unsupported option of FSDP2."""
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise LaunchError(
            f"fsdp_config.fsdp_version is {version}, but rl-vlm shards with fsdp2: set fsdp_version to 2, as in "
            "launch/accelerate/fsdp2.yaml"
        )
    reshard = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true")
    if reshard.lower() not in ("true", "false"):
        raise LaunchError(f"fsdp_config.fsdp_reshard_after_forward is {reshard}: with fsdp2 it is true or false")
    for key, accepted in FSDP_KEYS.items():
        value = environment.get(key.upper(), "")
        if value and value.lower() not in map(str.lower, accepted):
            others = f", only {' or '.join(accepted)}" if accepted else ""
            raise LaunchError(
                f"fsdp_config.{key} {value} is not supported{others}: remove it. Keys that are read: {READ_BY_FSDP2}"
            )


def deepspeed_config(environment: Mapping[str, str]) -> dict[str, Any]:
    """Build the DeepSpeed config from the JSON file, if one is named, and the launcher's own options.

    Raises LaunchError if the file cannot be read, or if it has another value for an option.
    """
    path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    options = {key: _parsed(environment[name]) for name, key in DEEPSPEED_OPTIONS.items() if name in environment}
    if path == "none":
        options.setdefault("zero_optimization.stage", 2)  # accelerate's default
    # Without a file, sizes follow the width of the model: DeepSpeed's own buckets are 2 GB each.
    config = {"zero_optimization": dict.fromkeys(AUTO_SIZES, "auto")} if path == "none" else read_json(path)
    for key, value in options.items():
        set_option(config, key, value)
    if "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES" in environment:
        raise LaunchError("deepspeed_config.deepspeed_moe_layer_cls_names is not supported: remove it")
    return config


def read_json(path: str) -> dict[str, Any]:
    """Return the content of a DeepSpeed config file. Raises LaunchError if it has no ZeRO section."""
    try:
        config = json_text.parse(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"the DeepSpeed config {path} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise LaunchError(f"the DeepSpeed config {path} has no section zero_optimization with a stage")
    return config


def set_option(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its dotted key. Raise LaunchError if the key has another value, unless that is `auto`."""
    *sections, name = key.split(".")
    for section in sections:
        config[section] = config.get(section) or {}
        config = config[section]
        if not isinstance(config, dict):
            raise LaunchError(f"the DeepSpeed config file sets {section} to {config!r}: write a section, {{…}}")
    if config.get(name, "auto") not in ("auto", value):
        raise LaunchError(
            f"accelerate's options set {key} to {value}, and the DeepSpeed config file to {config[name]}: remove one"
        )
    config[name] = value


def _parsed(text: str) -> Any:
    try:
        return json_text.parse(text)
    except ValueError:
        return text  # a word, such as none, cpu and auto
