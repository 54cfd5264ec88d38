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
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rl_vlm.algorithm.logprobs import store_logprobs
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.errors import ModelError, OutOfMemory
from rl_vlm.model.probe import probed_embeddings
from rl_vlm.passes.passes import Passes
from rl_vlm.passes.recovery import free_memory, tried
from rl_vlm.stages import Stage
from rl_vlm.types import MicroBatch, ScoredGroup, Sharing, length_mask, pad_rows, to_device

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


class Probe(NamedTuple):
    """Log-probs of all tokens of some groups, and the gradient of a sum of them, in host memory and float32."""

    logprobs: Tensor
    gradient: Tensor
    """With respect to a vector that is added to all embeddings. The rows' layout does not matter to it."""


class StartCheck:
    """Compares shared rows with dense rows once, before the first step of a process."""

    def __init__(self, config: RunConfig, ranks: Collectives, passes: Passes) -> None:
        self.ranks = ranks
        self.passes = passes
        self.is_due = config.model.verify == "auto" and passes.sharing != "dense"

    def run(self, groups: Sequence[ScoredGroup]) -> list[Comparison]:
        """Compare rows of a few of the groups, and return the comparisons. All ranks must call it.

        Raises ModelError on every rank if a comparison does not hold on any. If memory runs out, the check is skipped
        on every rank. If ranks gather weights together, they cannot skip it, and OutOfMemory is raised.
        """
        self.is_due, start = False, time.perf_counter()
        found, failure = tried(partial(self.comparisons, groups[:NUM_GROUPS]))
        if failure is not None and self.passes.optimizer.strategy.equal_calls:
            raise OutOfMemory(f"the check before the first step: {failure}. Set model.verify: off to skip it")
        failures = list(filter(None, self.ranks.gather([failure])))
        if failures:
            free_memory()
            logger.warning("shared rows were not compared with dense rows: %s", failures[0])
            return []
        found = found or []
        with self.ranks.agree():
            refuse_differences(found, self.ranks.device)
        seconds = time.perf_counter() - start
        if found:
            differences = " and in ".join(map(str, found))
            logger.info("shared rows were compared with dense rows in %.1f s: they differ in %s", seconds, differences)
        return found

    def comparisons(self, groups: Sequence[ScoredGroup]) -> list[Comparison]:
        """Compute the rows in each way, and compare them. Raises AttemptFailed if memory runs out."""
        dtype = self.passes.policy.compute_dtype
        dense = self.probe(groups, "dense")
        others = [
            self.probe(groups, "dense", one_at_a_time=True),
            self.probe(groups, "dense", rounding=torch.finfo(dtype).eps / 2),
        ]
        return compare(self.probe(groups, "shared"), dense, others, SMALLEST_BOUND[dtype])

    def probe(
        self, groups: Sequence[ScoredGroup], sharing: Sharing, one_at_a_time: bool = False, rounding: float = 0.0
    ) -> Probe:
        """Compute log-probs and a gradient of the groups, shortened. Weights get no gradient.

        `sharing` is how rows are laid out. With `one_at_a_time`, each completion has a forward of its own. Embeddings
        are multiplied by 1 ± `rounding`.
        """
        passes, policy, checked = self.passes, self.passes.policy, [shortened(group) for group in groups]
        budget, go_back = 0 if one_at_a_time else None, policy.mark()
        together = passes.optimizer.strategy.equal_calls
        # dense rows have other shapes than a run compiles
        stance = torch.compiler.set_stance("force_eager" if sharing == "dense" else "default")
        try:
            with stance, probed_embeddings(policy.transformer, rounding) as vector:
                gradient = torch.zeros_like(vector)
                schedule = passes.schedule(checked, checked[0], policy.vision, together, sharing=sharing, budget=budget)
                for work in schedule:
                    batch = work.forward.batch
                    with passes.running(work):
                        logprobs_NT = policy(work.forward).logprobs_NT
                        gradient += torch.autograd.grad(signed_sum(batch, logprobs_NT), vector)[0]
                    if not batch.is_dummy:
                        store_logprobs(batch, logprobs_NT.detach().float(), Stage.OLD_LOGPROBS)
        finally:
            go_back()
        logprobs = [group.old_logprobs[i] for group in checked for i in sorted(group.old_logprobs)]
        return Probe(torch.cat(logprobs), gradient.cpu())


def shortened(scored: ScoredGroup) -> ScoredGroup:
    """Return a new group of the first completions and their first tokens. All of them are valid."""
    completions = [completion.first_tokens(MAX_TOKENS) for completion in scored.group.completions[:NUM_COMPLETIONS]]
    num = len(completions)
    return ScoredGroup(
        replace(scored.group, completions=completions), scored.scores_GF[:num], scored.rewards_G[:num],
        scored.advantages_G[:num], valid_G=torch.ones(num, dtype=torch.bool), has_variance=True,
    )  # fmt: skip


def signed_sum(batch: MicroBatch, logprobs_NT: Tensor) -> Tensor:
    """Return a sum of log-probs with weights of both signs, which depend on each token and its position."""
    if batch.is_dummy:
        return 0.0 * logprobs_NT.sum()
    tokens_NT = pad_rows([c.token_ids for c in batch.completions])
    mask_NT = length_mask([len(c.token_ids) for c in batch.completions])
    weights_NT = torch.cos(tokens_NT + torch.arange(tokens_NT.shape[1])) * mask_NT
    return (to_device(weights_NT, logprobs_NT.device) * logprobs_NT).sum()


def compare(shared: Probe, dense: Probe, others: Sequence[Probe], smallest_bound: float) -> list[Comparison]:
    """Compare the probes of shared and dense rows. `others` are the same dense rows, computed in other ways.

    Return nothing if dense rows are not finite. Training then ends after a few steps, and says so.
    """
    if not (dense.logprobs.isfinite().all() and dense.gradient.isfinite().all()):
        return []

    def bound(of_dense: Sequence[float]) -> float:
        return max(smallest_bound, MARGIN * max(of_dense))

    logprobs = [logprob_difference(each, dense) for each in (shared, *others)]
    gradients = [gradient_difference(each, dense) for each in (shared, *others)]
    return [
        Comparison("log-probs", logprobs[0], bound(logprobs[1:])),
        Comparison("the norm of a gradient", gradients[0], bound(gradients[1:])),
    ]


def logprob_difference(a: Probe, b: Probe) -> float:
    """Return the root mean square of the differences, divided by the root mean square of `b`, or by 1 if larger."""
    return rms(a.logprobs - b.logprobs) / max(rms(b.logprobs), 1.0)


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
            "the largest difference between dense rows that are computed in three ways. On a GPU, try "
            "memory.shared_attention: sdpa, and then model.fused: off. memory.prefix_sharing: dense computes each "
            "prompt once per completion. model.verify: off skips this check."
        )
