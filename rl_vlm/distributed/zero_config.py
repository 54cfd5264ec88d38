"""The DeepSpeed config of a run: the launcher's config, completed by the run's settings.

The config is checked first. Each key is used, has a value that asks for nothing, or is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.launch_variables import AUTO_SIZES, Launch
from rl_vlm.distributed.shardings import DEEPSPEED, SHARDINGS, Sharding
from rl_vlm.errors import ConfigError, LaunchError, did_you_mean, shorten

SET_BY_RUN = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16 fp16
    zero_allow_untested_optimizer
""".split()
PASSED_ON = """
    zero_optimization zero_force_ds_cpu_optimizer communication_data_type
    prescale_gradients gradient_predivide_factor steps_per_print wall_clock_breakdown memory_breakdown dump_state
    flops_profiler comms_logger disable_python_gc log_level
""".split()
"""Keys that are passed to DeepSpeed unchanged."""
SECTIONS = "bf16 fp16 flops_profiler comms_logger zero_optimization".split()
PRECISION = "the precision is model.dtype, with trained weights, their gradients and moments in float32"
ZERO_REFUSED = """
    cpu_offload cpu_offload_param elastic_checkpoint leaf_module stage3_module_granularity_threshold
    zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zenflow
    save_muon_momentum_buffer_in_memory
""".split()
"""Keys of `zero_optimization` that are not supported."""
ZERO_NEEDED = ("ignore_unused_parameters", "compute_grad_norm")
"""Keys of `zero_optimization` that must not be false. A text-only batch leaves the vision tower without gradients, and
the norm shows whether gradients are finite."""

REDUCE_BUCKET = 5 * 10**8
"""DeepSpeed's default of `reduce_bucket_size`: the number of gradient values that it sends at once."""


def check_zero_config(asked: Mapping[str, Any], config: RunConfig, world_size: int) -> None:
    """Raise LaunchError if a DeepSpeed config contradicts the run, or has a key that is not used."""
    known = [*SET_BY_RUN, *PASSED_ON]
    for name, value in asked.items():
        meant = did_you_mean(name, known)
        if name not in known and (
            not asks_for_nothing(value) or (meant and value)
        ):  # a misspelt key asks for something
            raise LaunchError(
                f"the DeepSpeed config has {name}{meant}, which a run does not read: remove it. The "
                "optimizer, its schedule, the precision, checkpoints and trackers are settings of the run."
            )
        if name in SECTIONS and not isinstance(value, Mapping | None):
            raise LaunchError(f'the DeepSpeed config sets {name} to {value!r}: write a section, {{"{name}": {{…}}}}')
    check_batches(asked, config, world_size)
    check_precision(asked, config.model.precision)
    zero = asked.get("zero_optimization") or {}
    check_zero(zero)
    check_zero_keys(zero)
    check_readable(asked)


def check_readable(asked: Mapping[str, Any]) -> None:
    """Raise LaunchError if DeepSpeed cannot read a value. Ignore `auto`."""
    from deepspeed.runtime.config import DeepSpeedConfig

    for name in [*PASSED_ON, *SECTIONS]:
        value = asked.get(name) or {}
        if name in SECTIONS:
            value = {key: part for key, part in value.items() if part != "auto"}
        try:
            DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **({name: value} if value else {})})
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise LaunchError(
                f"the DeepSpeed config sets {name} to {asked[name]!r}, which DeepSpeed cannot read: {shorten(error)}"
            ) from error


def asks_for_nothing(value: Any) -> bool:
    """Return whether a value is empty or disabled, or splits a model over one device only."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(map(asks_for_nothing, value.values()))
    return value in (None, False, "none", "auto") or (value == 1 and value is not True)


def check_batches(asked: Mapping[str, Any], config: RunConfig, world_size: int) -> None:
    """Raise LaunchError if an explicit batch size or clipping differs from the run's."""
    sizes = batch_sizes(config, world_size)
    accumulation = sizes.gradient_accumulation_steps
    run_values = {
        "train_batch_size": sizes.completions_per_step,
        "train_micro_batch_size_per_gpu": sizes.completions_per_step // (world_size * accumulation),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.train.max_grad_norm,
    }
    for name, value in run_values.items():
        if asked.get(name) not in ("auto", None, value):
            raise LaunchError(
                f"the DeepSpeed config sets {name} to {asked[name]}, but the run has {value}: set {name} to auto. "
                "Batches are counted in completions, as in TRL; clipping is train.max_grad_norm."
            )


def check_precision(asked: Mapping[str, Any], dtype: str) -> None:
    """Raise LaunchError if the config's precision differs from the run's."""
    for name, wanted in {"bf16": dtype == "bfloat16", "fp16": False}.items():
        section = asked.get(name) or {}
        enabled = section.get("enabled", "auto")
        if enabled not in ("auto", wanted):
            raise LaunchError(
                f"the DeepSpeed config sets {name}.enabled to {enabled}, but model.dtype is {dtype}: set "
                f"{name}.enabled to auto, or remove the section"
            )
        for key, value in section.items():  # weights, gradients or moments of 16 bits
            is_set = value is not False and key.startswith(f"{name}_")
            if is_set or (name == "bf16" and key != "enabled" and not asks_for_nothing(value)):
                raise LaunchError(f"the DeepSpeed config sets {name}.{key}: remove it; {PRECISION}")


def check_zero(zero: Mapping[str, Any]) -> None:
    """Raise LaunchError if `zero_optimization` is not supported. DeepSpeed need not be installed."""
    stage = zero.get("stage")
    if stage not in (1, 2, 3):
        raise LaunchError(
            f"ZeRO stage {stage} is not supported: use 1, 2 or 3. Without sharding, use launch/accelerate/ddp.yaml"
        )
    refused = [name for name in ZERO_REFUSED if not asks_for_nothing(zero.get(name))]
    refused += [f"{name} false" for name in ZERO_NEEDED if zero.get(name) is False]
    if refused:
        raise LaunchError(f"zero_optimization.{refused[0]} is not supported: remove it")
    check_offload(zero)


def check_zero_keys(zero: Mapping[str, Any]) -> None:
    """Raise LaunchError if DeepSpeed does not know a key or cannot use its value. Skip this if it is not installed."""
    if find_spec("deepspeed") is None:
        return
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
        problem = f"not known{did_you_mean(key, known)}" if first["type"] == "extra_forbidden" else first["msg"]
        raise LaunchError(f"the DeepSpeed config has zero_optimization.{key} {first['input']!r}: {problem}") from error


def check_offload(zero: Mapping[str, Any]) -> None:
    """Raise LaunchError if the config offloads optimizer state or weights to anything but host memory."""
    sections = {name: zero.get(name) or {} for name in ("offload_optimizer", "offload_param")}
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise LaunchError(f'zero_optimization.{name} is {section!r}: write a section, {{"device": "cpu"}}')
        device = section.get("device", "none")
        if device not in ("none", "cpu"):
            raise LaunchError(f"zero_optimization.{name}.device {device} is not supported: use cpu or none")
    if sections["offload_param"].get("device") == "cpu" and zero["stage"] < 3:
        raise LaunchError(
            f"zero_optimization.offload_param needs stage 3, but the stage is {zero['stage']}: before stage 3 every "
            "device holds all weights"
        )
    optimizer = sections["offload_optimizer"]
    if optimizer.get("super_offload") or optimizer.get("ratio", 1) != 1:
        raise LaunchError("zero_optimization.offload_optimizer offloads the whole state: remove ratio, super_offload")


def zero_config(asked: Mapping[str, Any], config: RunConfig, hidden_size: int, has_gpu: bool) -> dict[str, Any]:
    """Build the config for `deepspeed.initialize` from one that `check_zero_config` accepts.

    The run's values replace `auto`.
    """
    result = {name: copy.deepcopy(asked[name]) for name in PASSED_ON if name in asked}
    fill_sizes(result["zero_optimization"], hidden_size)
    if not has_gpu:
        result["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own Adam would be compiled first
    return {"steps_per_print": 2**31} | result | {
        # One engine step per optimizer step; the trainer says which backward pass is the last of a step.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.train.max_grad_norm,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def fill_sizes(zero: dict[str, Any], hidden_size: int) -> None:
    """Replace `auto` sizes by the sizes that Hugging Face's Trainer uses."""
    sizes = dict(zip(AUTO_SIZES, (hidden_size**2, int(0.9 * hidden_size**2), 10 * hidden_size), strict=True))
    zero |= {name: size for name, size in sizes.items() if zero.get(name) == "auto"}
    for name in [name for name, value in zero.items() if value == "auto"]:
        del zero[name]


def launched_sharding(launch: Launch) -> Sharding:
    """Return the row of a DeepSpeed launch. Raise an error if its config is not supported."""
    zero = launch.deepspeed["zero_optimization"]
    check_zero(zero)
    return zero_sharding(zero)


def check_launched_keys(launch: Launch) -> None:
    """Raise LaunchError if DeepSpeed is installed and does not accept `zero_optimization` of a launch."""
    check_zero_keys(launch.deepspeed["zero_optimization"])


def zero_sharding(zero: Mapping[str, Any]) -> Sharding:
    """Return the row for a section `zero_optimization`, with the size of its bucket.

    Raises ConfigError if the table has no such row, as for weights in host memory at stage 2.
    """
    return replace(row_of(zero), reduce_bucket=reduce_bucket(zero))


def row_of(zero: Mapping[str, Any]) -> Sharding:
    """Return the row of the table for a section `zero_optimization`. Raises ConfigError if the table has none."""
    state, weights = (is_offloaded(zero, name) for name in ("offload_optimizer", "offload_param"))
    for row in SHARDINGS.values():
        stage = 1 + row.shards_gradients + row.shards_weights
        offloads = (row.offloads_state, row.offloads_weights)
        if row.kind is DEEPSPEED and stage == zero.get("stage") and offloads == (state, weights):
            return row
    raise ConfigError(f"ZeRO stage {zero.get('stage')} with offload_param is not supported: use stage 3")


def reduce_bucket(zero: Mapping[str, Any]) -> int | None:
    """Return the size of DeepSpeed's bucket, or None if it depends on the model. Raise ConfigError if it is invalid."""
    size = zero.get("reduce_bucket_size", REDUCE_BUCKET)
    if size == "auto":
        return None
    if not isinstance(size, int | float) or not 0 < size < 2**63:
        raise ConfigError(f"zero_optimization.reduce_bucket_size is {size!r}: it should be a number of values, or auto")
    return int(size)


def is_offloaded(zero: Mapping[str, Any], name: str) -> bool:
    """Return whether this section of `zero_optimization` offloads to host memory."""
    return (zero.get(name) or {}).get("device", "none") != "none"
