"""Settings that come as Python objects: fields of TRL's GRPOConfig, paths, precisions."""

from __future__ import annotations

import dataclasses
import os
from enum import Enum
from typing import Any

PRECISIONS = ("bf16", "fp16")
"""Fields whose defaults TRL refuses on some hardware."""
COMPUTED = ("generation_batch_size", "do_eval")
"""Fields that TRL computes from `steps_per_generation` and `eval_strategy`, if they are not set."""


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
    names = [field.name for field in dataclasses.fields(args) if field.init and field.name not in COMPUTED]
    given = {n: getattr(args, n) for n in names if n in always or getattr(args, n) != getattr(empty, n)}
    if args.steps_per_generation == args.gradient_accumulation_steps:  # the default, which TRL fills in
        given.pop("steps_per_generation", None)
    if args.use_cpu and torch.cuda.is_available():
        given["use_cpu"] = True  # refused by trl_refused.py
    return given


def plain(value: Any) -> Any:
    """Convert a path, a member of an enum or a PyTorch precision to text. Return anything else unchanged."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value.value if isinstance(value, Enum) else value
