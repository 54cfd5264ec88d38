"""The checks of a proof, and the meaning of their results.

Bounds are multiples of the differences between dense rows if only the batch changes, or if embeddings are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rl_vlm.errors import ModelError

CheckResult = Literal["holds", "failed", "untried"]
MARGIN = 10.0
"""Bounds are this many times the differences between dense rows."""
SMALLEST_BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Smallest relative bound, by precision."""
WORST = 5.0
"""Smallest bound of a single token, divided by the smallest bound of the root mean square over all tokens."""
ROWS = "the first rows"
AGAIN = "dense rows and the same rows once more"
OWN_FORWARD = "dense rows and the model's own forward"
SHARED = "shared rows and dense rows"
OTHER_IMAGES = "the run's rows and rows with other images"
OTHER_PROMPTS = "the run's rows and rows with the prompt of another row"
SIBLINGS = "the run's rows and rows beside other completions"
ROLLOUTS = "rollouts and dense rows"
GRADIENTS = "trained weights"
JOINED = "images of several prompts in one run of the vision tower and in a run each"


@dataclass(frozen=True)
class Comparison:
    """The difference between two ways to compute a value, or between values that must differ."""

    name: str
    difference: float
    bound: float
    unlike: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the difference is within its bound, or above it if the values must differ. NaN is neither."""
        return self.difference > self.bound if self.unlike else self.difference <= self.bound

    @property
    def excess(self) -> float:
        """Return how many times the bound the difference is. NaN is infinitely many."""
        return inf if isnan(self.difference) else self.difference / self.bound

    def __str__(self) -> str:
        return f"{self.name} by {self.difference:.1e} ({'above' if self.unlike else 'bound'} {self.bound:.1e})"


@dataclass(frozen=True)
class ProofCheck:
    """A comparison with the differences found, or the reason why it was not tried."""

    of: str
    comparisons: tuple[Comparison, ...] = ()
    untried: str | None = None
    problem: str | None = None
    """A fault other than a difference."""
    found: str = ""
    """The result of a check without comparisons."""

    @property
    def holds(self) -> bool:
        """Return whether nothing is wrong. A check that was not tried holds."""
        return self.problem is None and all(each.holds for each in self.comparisons)

    @property
    def result(self) -> CheckResult:
        """Return the result in a word."""
        return "untried" if self.untried is not None else "holds" if self.holds else "failed"

    def __str__(self) -> str:
        if self.untried is not None:
            return f"{self.of} were not checked: {self.untried}"
        if self.problem is not None:
            return f"{self.of}: {self.problem}"
        if not self.comparisons:
            return f"{self.of} {self.found}"
        return f"{self.of} differ in {' and in '.join(map(str, self.comparisons))}"


class Probe(NamedTuple):
    """Log-probs of all tokens of some groups, and gradients of a sum of them, in host memory and float32."""

    logprobs: Tensor
    gradients: dict[str, Tensor]
    """By name, the gradients of a vector that is added to all embeddings, and of a few trained weights. They do not
    depend on the layout of rows."""
    weights: frozenset[int] = frozenset()
    """The `id`s of the weights that the log-probs depend on."""
    vision_apart: bool = False
    """Whether the vision tower ran apart from a forward, so that its weights are not among them."""


@dataclass(frozen=True)
class Expected:
    """Dense rows of shortened groups, computed in three ways."""

    dense: Probe
    others: list[Probe]
    smallest_bound: float

    @property
    def is_finite(self) -> bool:
        return all(bool(each.isfinite().all()) for each in (self.dense.logprobs, *self.dense.gradients.values()))

    def equal(self, found: Probe) -> tuple[Comparison, ...]:
        """Compare log-probs, and the gradient that differs most from its bound, with dense rows."""
        gradients = []
        for name, expected in self.dense.gradients.items():
            of_dense = [gradient_difference(each.gradients[name], expected) for each in self.others]
            difference = gradient_difference(found.gradients[name], expected)
            gradients.append(
                Comparison(f"the gradient of {name}", difference, self.bound(of_dense, self.smallest_bound))
            )
        worst = max(gradients, key=lambda each: each.excess)
        return *self.equal_logprobs(found.logprobs, self.dense.logprobs), worst

    def bound(self, of_dense: Sequence[float], smallest: float) -> float:
        """Return the bound for differences that dense rows have among themselves."""
        return max(smallest, MARGIN * max(of_dense))

    def equal_logprobs(self, found: Tensor, expected: Tensor) -> tuple[Comparison, ...]:
        """Compare log-probs of the same tokens under the bounds of all dense rows: over all tokens, and the worst."""

        def bound(difference: Callable[[Tensor, Tensor], float], smallest: float) -> float:
            return self.bound([difference(each.logprobs, self.dense.logprobs) for each in self.others], smallest)

        return (
            Comparison(
                "log-probs", logprob_difference(found, expected), bound(logprob_difference, self.smallest_bound)
            ),
            Comparison(
                "the worst log-prob",
                worst_difference(found, expected),
                bound(worst_difference, WORST * self.smallest_bound),
            ),
        )


@dataclass(frozen=True)
class Proof:
    """The checks of one start, and the way to compute rows that they allow."""

    checks: list[ProofCheck] = field(default_factory=list)
    fallback: str | None = None
    """The slower way with which the run continues."""
    joins_images: bool | None = None
    """Whether images of several prompts share a run of the tower. None if the table of families says so."""

    def state(self) -> dict[str, Any]:
        """Return the proof with JSON types."""
        checks = [{"of": each.of, "check": str(each), "result": each.result} for each in self.checks]
        return {"checks": checks, "fallback": self.fallback, "joins_images": self.joins_images}


def logprob_difference(a: Tensor, b: Tensor) -> float:
    """Return the root mean square of the differences, divided by the root mean square of `b`, or by 1 if larger."""
    return rms(a - b) / max(rms(b), 1.0)


def worst_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of a token, divided by the root mean square of `b`, or by 1 if larger."""
    return (a - b).abs().max().item() / max(rms(b), 1.0)


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def gradient_difference(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference of two gradients, relative to the norm of `b`. Gradients of 0 are equal."""
    difference, expected = (a - b).norm().item(), b.norm().item()
    return difference / expected if expected else float(difference != 0)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"


def refuse(check: ProofCheck, device: torch.device) -> None:
    """Raise ModelError if a check does not hold."""
    if check.holds:
        return
    failed = [str(each) for each in check.comparisons if not each.holds]
    what = f"{check.of[0].upper()}{check.of[1:]}"
    differ = "do not differ" if any(each.unlike for each in check.comparisons) else "differ"
    found = (
        f": {check.problem}" if check.problem else f" {differ} on {device_name(device)} in {' and in '.join(failed)}"
    )
    raise ModelError(f"{what}{found}. {ADVICE[check.of]} model.verify: off skips this check.")


ADVICE = {
    AGAIN: "Something in the model is random, such as dropout in its own code.",
    OWN_FORWARD: f"The bound is {MARGIN:g} times the largest difference between dense rows that are computed in three "
    "ways. The run would train another function than the model's own.",
    SHARED: f"Each bound is {MARGIN:g} times the largest difference between dense rows that are computed in three "
    "ways. On a GPU, try memory.shared_attention: sdpa, and then model.fused: off. memory.prefix_sharing: dense "
    "computes each prompt once per completion.",
    OTHER_IMAGES: "The model's own forward depends on the images, and the run's rows do not: pixels do not arrive.",
    OTHER_PROMPTS: "Prompts do not arrive.",
    SIBLINGS: "One completion sees another, so its log-probs are of another text.",
    ROLLOUTS: "The engine samples from another distribution than the one that is trained.",
    GRADIENTS: "model.freeze_vision_tower freezes the tower, and model.use_peft trains an adapter alone.",
}
