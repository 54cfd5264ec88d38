"""Arguments of learning rate schedules: their names, types and bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rl_vlm.config.sections import Sections
from rl_vlm.config.typed import why_not

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
NumSteps = Annotated[int | None, Field(ge=0)]
Shape = Literal["linear", "cosine", "1-sqrt"]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": Number},
    "cosine_with_restarts": {"num_cycles": Count},
    "polynomial": {"lr_end": Number, "power": Number},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": Annotated[int | None, Field(ge=1)]},
    "cosine_with_min_lr": {"min_lr": Number, "min_lr_rate": Fraction, "num_cycles": Number},
    "warmup_stable_decay": {
        "num_decay_steps": Count, "num_stable_steps": NumSteps, "warmup_type": Shape,
        "decay_type": Shape, "min_lr_ratio": Fraction, "num_cycles": Number,
    },
}  # fmt: skip
"""Arguments that `transformers.get_scheduler` passes to each schedule, with their types."""
POLYNOMIAL_LR_END = 1e-7
"""Default of `lr_end` in transformers."""


def unknown_arguments(run: Sections) -> list[dict[str, Any]]:
    """Return the unknown arguments of a schedule, and its known ones."""
    known = ARGUMENTS[run.train.lr_scheduler_type]
    unknown = sorted(run.train.lr_scheduler_kwargs.keys() - known.keys())
    return [{"found": ", ".join(unknown), "valid": ", ".join(known) or "none"}] if unknown else []


def wrong_arguments(run: Sections) -> list[dict[str, Any]]:
    """Return the arguments of a wrong type, with the reasons."""
    known, given = ARGUMENTS[run.train.lr_scheduler_type], run.train.lr_scheduler_kwargs
    wrong = {name: why for name in known if name in given and (why := why_not(given[name], known[name]))}
    return [{"name": name, "value": given[name], "why": why} for name, why in wrong.items()]


def min_lr_above_peak(run: Sections) -> bool:
    """Return whether the schedule has `min_lr`, and it is a number above the learning rate."""
    train = run.train
    is_read = "min_lr" in ARGUMENTS[train.lr_scheduler_type] and not wrong_arguments(run)
    return is_read and train.lr_scheduler_kwargs.get("min_lr", 0.0) > train.learning_rate


def end_above_peak(run: Sections) -> list[dict[str, Any]]:
    """Return the end of a polynomial schedule if it is not below the learning rate."""
    train = run.train
    end = train.lr_scheduler_kwargs.get("lr_end", POLYNOMIAL_LR_END)
    is_above = train.lr_scheduler_type == "polynomial" and not wrong_arguments(run) and end >= train.learning_rate
    return [{"end": end, "default": POLYNOMIAL_LR_END}] if is_above else []
