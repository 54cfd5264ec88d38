"""A check before the first step: shared rows and dense rows give the same results, with this device and these rows.

a few of the first completions ─► dense rows, together ──────────────────► expected
                               ├► dense rows, one at a time, or rounded ─► their own rounding ─► bounds
                               └► shared rows ───────────────────────────► within the bounds, or the run ends
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.errors import ModelError
from rl_vlm.passes.passes import Passes, Probe
from rl_vlm.types import ScoredGroup

logger = logging.getLogger(__name__)

NUM_GROUPS = 2
"""Groups that a rank checks. Two prompts in a row show whether one sees the other."""
NUM_COMPLETIONS = 3
MAX_TOKENS = 128
"""Tokens of a checked completion, at most. It then ends in another block of FlexAttention than it begins."""
MARGIN = 10.0
"""Bounds are this many times the differences between dense rows."""
SMALLEST_BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Smallest relative bound, by precision."""


@dataclass(frozen=True)
class Comparison:
    """The difference between two ways to compute the same value."""

    name: str
    difference: float
    bound: float

    @property
    def holds(self) -> bool:
        """Return whether the difference is within the bound. A difference that is not a number never is."""
        return self.difference <= self.bound

    def __str__(self) -> str:
        return f"{self.name} by {self.difference:.1e} (bound {self.bound:.1e})"


class StartCheck:
    """Compares shared rows with dense rows once, before the first step of a process."""

    def __init__(self, config: RunConfig, ranks: Collectives, passes: Passes) -> None:
        self.ranks = ranks
        self.passes = passes
        self.is_due = config.model.verify == "auto" and passes.sharing != "dense"

    def run(self, groups: Sequence[ScoredGroup]) -> list[Comparison]:
        """Compare rows of a few of the groups, and return the comparisons. All ranks must call it.

        Raises ModelError on every rank if a comparison does not hold on any.
        """
        self.is_due, start = False, time.perf_counter()
        checked = [shortened(group) for group in groups[:NUM_GROUPS]]
        together = self.passes.probe(checked, "dense")
        others = [
            self.passes.probe(checked, "dense", one_at_a_time=True),
            self.passes.probe(checked, "dense", rounding=torch.finfo(self.passes.policy.compute_dtype).eps),
        ]
        shared = self.passes.probe(checked, "shared")
        found = compare(shared, together, others, SMALLEST_BOUND[self.passes.policy.compute_dtype])
        with self.ranks.agree():
            refuse_differences(found, self.ranks.device)
        seconds, differences = time.perf_counter() - start, " and in ".join(map(str, found)) or "values not finite"
        logger.info("shared rows were compared with dense rows in %.1f s: they differ in %s", seconds, differences)
        return found


def shortened(scored: ScoredGroup) -> ScoredGroup:
    """Return a group of the first completions and their first tokens. All of them are valid."""
    completions = [
        replace(c, token_ids=c.token_ids[:MAX_TOKENS], generator_logprobs=c.generator_logprobs[:MAX_TOKENS])
        for c in scored.group.completions[:NUM_COMPLETIONS]
    ]
    num = len(completions)
    return ScoredGroup(
        replace(scored.group, completions=completions), scored.scores_GF[:num], scored.rewards_G[:num],
        scored.advantages_G[:num], valid_G=torch.ones(num, dtype=torch.bool), has_variance=True,
    )  # fmt: skip


def compare(shared: Probe, together: Probe, others: Sequence[Probe], smallest_bound: float) -> list[Comparison]:
    """Compare the probes of shared and dense rows. `others` are the same dense rows, computed in other ways.

    Return nothing if dense rows are not finite. Training then ends after a few steps, and says so.
    """
    if not (together.logprobs.isfinite().all() and together.gradient.isfinite().all()):
        return []

    def bound(of_dense: Sequence[float]) -> float:
        return max(smallest_bound, MARGIN * max(of_dense))

    logprobs = [logprob_difference(each, together) for each in (shared, *others)]
    gradients = [gradient_difference(each, together) for each in (shared, *others)]
    return [
        Comparison("log-probs", logprobs[0], bound(logprobs[1:])),
        Comparison("the norm of a gradient", gradients[0], bound(gradients[1:])),
    ]


def logprob_difference(a: Probe, b: Probe) -> float:
    """Return the root mean square of the differences, relative to the root mean square of `b`, or to 1."""
    size = max(rms(b.logprobs), 1.0)
    return rms(a.logprobs - b.logprobs) / size


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def gradient_difference(a: Probe, b: Probe) -> float:
    """Return the difference of the gradients' norms, relative to the norm of `b`."""
    expected = b.gradient.norm().item()
    return abs(a.gradient.norm().item() - expected) / expected if expected else 0.0


def refuse_differences(found: Sequence[Comparison], device: torch.device) -> None:
    """Raise ModelError if a comparison does not hold."""
    if failed := [str(each) for each in found if not each.holds]:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
        raise ModelError(
            f"Shared rows and dense rows differ on {name} in {' and in '.join(failed)}. Each bound is {MARGIN:g} times "
            "the difference between dense rows that are computed in two ways. Set memory.shared_attention: sdpa, or "
            "memory.prefix_sharing: dense, which computes prompts once per completion. model.verify: off skips this "
            "check."
        )
