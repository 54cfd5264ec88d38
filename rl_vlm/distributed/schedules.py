"""Learning rates by step, with the names, arguments and values of `transformers.get_scheduler`.

The import of that function loads PEFT, bitsandbytes and TorchInductor, which takes seconds of each start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_vlm.config.schedules import POLYNOMIAL_LR_END

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

    def progress(self, step: int) -> float:
        """Return the share of steps after the warm-up that are done."""
        return (step - self.num_warmup) / max(1, self.num_steps - self.num_warmup)


def learning_rate_factor(name: str, span: Span, arguments: dict[str, Any]) -> Factor:
    """Return the schedule `name`. `rl_vlm.config.schedules.ARGUMENTS` lists the arguments of each."""
    if name == "warmup_stable_decay":
        return warmup_stable_decay(span, **arguments)
    if name == "constant":
        return constant(span)
    after_warmup = AFTER_WARMUP[name](span, **arguments)
    return lambda step: step / max(1, span.num_warmup) if step < span.num_warmup else after_warmup(step)


def constant(span: Span) -> Factor:
    return lambda step: 1.0


def linear(span: Span) -> Factor:
    return lambda step: max(0.0, (span.num_steps - step) / max(1, span.num_steps - span.num_warmup))


def cosine(span: Span, num_cycles: float = 0.5) -> Factor:
    """Decay along a cosine of `num_cycles` waves."""
    return lambda step: max(0.0, wave(num_cycles, span.progress(step)))


def cosine_with_restarts(span: Span, num_cycles: int = 1) -> Factor:
    """Decay from the peak to 0 `num_cycles` times."""

    def factor(step: int) -> float:
        progress = span.progress(step)
        return 0.0 if progress >= 1 else max(0.0, wave(0.5, (num_cycles * progress) % 1.0))

    return factor


def cosine_with_min_lr(
    span: Span, min_lr: float | None = None, min_lr_rate: float = 0.0, num_cycles: float = 0.5
) -> Factor:
    """Decay along a cosine to `min_lr`, or to `min_lr_rate` times the peak."""
    lowest = min_lr_rate if min_lr is None else min_lr / span.peak
    return lambda step: max(0.0, above(lowest, wave(num_cycles, span.progress(step))))


def polynomial(span: Span, lr_end: float = POLYNOMIAL_LR_END, power: float = 1.0) -> Factor:
    """Decay to the learning rate `lr_end` like the remaining share of steps to the power of `power`."""

    def factor(step: int) -> float:
        if step > span.num_steps:
            return lr_end / span.peak
        remaining = 1 - span.progress(step)
        return ((span.peak - lr_end) * remaining**power + lr_end) / span.peak

    return factor


def inverse_sqrt(span: Span, timescale: int | None = None) -> Factor:
    """Decay like the inverse square root of the step, by `timescale` steps, which is the warm-up by default."""
    scale = timescale or span.num_warmup or 10_000
    return lambda step: 1.0 / math.sqrt((step + scale - span.num_warmup) / scale)


AFTER_WARMUP: dict[str, Callable[..., Factor]] = {
    "constant_with_warmup": constant,
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "cosine_with_min_lr": cosine_with_min_lr,
    "polynomial": polynomial,
    "inverse_sqrt": inverse_sqrt,
}
"""Schedules that begin with a linear warm-up from 0."""


def warmup_stable_decay(
    span: Span,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    """Rise from `min_lr_ratio` times the peak, stay there, and fall back. By default all other steps stay."""
    stable = span.num_steps - span.num_warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    rises: dict[str, Callable[[float], float]] = {
        "linear": lambda x: x,
        "cosine": lambda x: 0.5 * (1.0 - math.cos(math.pi * x)),
        "1-sqrt": lambda x: 1.0 - math.sqrt(1.0 - x),
    }
    falls: dict[str, Callable[[float], float]] = {
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: wave(num_cycles, x),
        "1-sqrt": lambda x: 1.0 - math.sqrt(x),
    }

    def factor(step: int) -> float:
        if step < span.num_warmup:
            return max(0.0, above(min_lr_ratio, rises[warmup_type](step / span.num_warmup)))
        after_stable = step - span.num_warmup - stable
        if after_stable < 0:
            return 1.0
        if after_stable >= num_decay_steps:
            return min_lr_ratio
        return max(0.0, above(min_lr_ratio, falls[decay_type](after_stable / num_decay_steps)))

    return factor


def wave(num_cycles: float, progress: float) -> float:
    """Return a cosine between 1, at its start, and 0."""
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


def above(lowest: float, factor: float) -> float:
    """Map 0 to `lowest`, and 1 to 1."""
    return factor * (1 - lowest) + lowest
