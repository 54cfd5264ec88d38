"""The DeepSpeed config of a run: the launcher's, with the run's values for what the run sets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import LaunchError

SET_BY_RUN = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16 fp16".split()
)
REFUSED = {
    "optimizer": "the optimizer is AdamW, with train.learning_rate and other settings",
    "scheduler": "the schedule is train.lr_scheduler_type",
    "tensor_parallel": "to train a model that does not fit on one device, use ZeRO-3 or FSDP2",
    "amp": "the precision is model.dtype",
    "torch_autocast": "the precision is model.dtype",
    "activation_checkpointing": "gradient checkpointing is memory.gradient_checkpointing",
    "managed_gradient_accumulation": "the trainer sets the micro-batches of a step",
    "pipeline": "to train a model that does not fit on one device, use ZeRO-3 or FSDP2",
    "compression_training": "it changes the weights that are trained",
    "hybrid_engine": "rollouts are rollout.engine",
    "sequence_parallel_size": "it is not supported",
}
"""Sections that contradict the run, with what to use instead."""
AUTO_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Sizes that depend on the model's width if they are `auto`."""


def zero_config(asked: Mapping[str, Any], config: RunConfig, hidden_size: int, has_gpu: bool) -> dict[str, Any]:
    """Return the config for `deepspeed.initialize`.

    `auto` takes the run's value. Raises LaunchError if a section or an explicit value contradicts the run.
    """
    for name, instead in REFUSED.items():
        if asked.get(name) not in (None, {}, False, 1):
            raise LaunchError(f"the DeepSpeed config has {name!r}: remove it, {instead}")
    check_values(asked, config)
    result = {name: copy.deepcopy(value) for name, value in asked.items() if name not in SET_BY_RUN}
    zero = result["zero_optimization"]
    check_zero(zero)
    fill_sizes(zero, hidden_size)
    if not has_gpu:
        result["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own Adam would be compiled first
    return result | {
        # One engine step per optimizer step; the trainer says which backward pass is the last of a step.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.train.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }


def check_values(asked: Mapping[str, Any], config: RunConfig) -> None:
    """Raise LaunchError if an explicit batch size, clipping or precision differs from the run's."""
    train = config.train
    run_values = {
        "train_micro_batch_size_per_gpu": ("train.per_device_train_batch_size", train.per_device_train_batch_size),
        "gradient_accumulation_steps": ("train.gradient_accumulation_steps", train.gradient_accumulation_steps),
        "gradient_clipping": ("train.max_grad_norm", train.max_grad_norm),
        "train_batch_size": ("the run's batch", None),
    }
    for name, (setting, value) in run_values.items():
        if asked.get(name, "auto") not in ("auto", None, value):
            raise LaunchError(
                f"the DeepSpeed config sets {name} to {asked[name]}, and {setting} is {value}: set {name} to auto"
            )
    precisions = {"bf16": config.model.dtype == "bfloat16", "fp16": False}
    for name, wanted in precisions.items():
        enabled = (asked.get(name) or {}).get("enabled", "auto")
        if enabled not in ("auto", wanted):
            raise LaunchError(
                f"the DeepSpeed config has {name}.enabled {enabled}, and model.dtype is {config.model.dtype}: set "
                f"{name}.enabled to auto, or remove the section"
            )


def check_zero(zero: Mapping[str, Any]) -> None:
    """Raise LaunchError if the ZeRO stage, an offload device, or the missing norm of gradients is not supported."""
    if zero.get("stage") not in (1, 2, 3):
        raise LaunchError(
            f"ZeRO stage {zero.get('stage')} is not supported: 1, 2 and 3 are. Without sharding, use "
            "launch/accelerate/ddp.yaml"
        )
    if not zero.get("compute_grad_norm", True):
        raise LaunchError(
            "zero_optimization.compute_grad_norm false is not supported: steps that are not finite are found by the "
            "norm; remove it"
        )
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            raise LaunchError(f"zero_optimization.{part}.device {device} is not supported: cpu and none are")


def fill_sizes(zero: dict[str, Any], hidden_size: int) -> None:
    """Replace `auto` sizes by those of Hugging Face's Trainer."""
    sizes = dict(zip(AUTO_SIZES, (hidden_size**2, int(0.9 * hidden_size**2), 10 * hidden_size), strict=True))
    zero |= {name: size for name, size in sizes.items() if zero.get(name) == "auto"}
    for name in [name for name, value in zero.items() if value == "auto"]:
        del zero[name]
