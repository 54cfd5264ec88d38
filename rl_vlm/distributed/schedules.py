"""Learning rates by step, as `transformers.get_scheduler` computes them.

The import of that function loads PEFT, bitsandbytes and TorchInductor, which takes seconds of each start. So the usual
schedules are here, and it is imported for the others.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Factor = Callable[[int], float]
"""The learning rate of a step, divided by its peak. Steps are counted from 0."""


@dataclass(frozen=True)
class Span:
    """The steps of a schedule."""

    peak: float
    """Learning rate after the warm-up."""
    num_warmup: int
    num_steps: int
    """Steps of the whole run."""


def learning_rate_factor(name: str, span: Span, arguments: dict[str, Any]) -> Factor:
    """Return the schedule `name`. `rl_vlm.config.schedules.ARGUMENTS` lists the arguments of each."""
    if name == "constant":
        return lambda step: 1.0
    if name not in AFTER_WARMUP:
        return of_transformers(name, span, arguments)
    after_warmup = AFTER_WARMUP[name](span, **arguments)
    return lambda step: step / max(1, span.num_warmup) if step < span.num_warmup else after_warmup(step)


def linear(span: Span) -> Factor:
    """Decay to 0 in equal steps."""
    return lambda step: max(0.0, (span.num_steps - step) / max(1, span.num_steps - span.num_warmup))


def cosine(span: Span, num_cycles: float = 0.5) -> Factor:
    """Decay along a cosine of `num_cycles` waves."""

    def factor(step: int) -> float:
        progress = (step - span.num_warmup) / max(1, span.num_steps - span.num_warmup)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))

    return factor


AFTER_WARMUP: dict[str, Callable[..., Factor]] = {
    "constant_with_warmup": lambda span: lambda step: 1.0,
    "linear": linear,
    "cosine": cosine,
}
"""Schedules that begin with a linear warm-up from 0."""


def of_transformers(name: str, span: Span, arguments: dict[str, Any]) -> Factor:
    """Return a schedule of transformers."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=span.peak)  # some schedules read the peak from it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Both num_training_steps and num_stable_steps")
        scheduler: Any = get_scheduler(
            name, optimizer, span.num_warmup, span.num_steps, scheduler_specific_kwargs=dict(arguments)
        )
    return scheduler.lr_lambdas[0]
