"""Forwards of a proof: log-probs of the same completions in several layouts, and a gradient that does not depend on the
layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from rl_vlm.algorithm.logprobs import store_logprobs
from rl_vlm.model.probe import probed_embeddings, probed_weights, weights_behind
from rl_vlm.passes.checked_groups import taken
from rl_vlm.passes.proof import Probe, rms
from rl_vlm.passes.rounds import Rounds
from rl_vlm.passes.schedule import Round
from rl_vlm.stages import Stage
from rl_vlm.types import Forward, MicroBatch, Prompt, ScoredGroup, Sharing, SubGroup, length_mask, pad_rows, to_device

TINY = 1e-30
"""In place of the norm of features that are all 0."""
Way = Literal["own", "dense", "shared"]
"""A way to compute rows: by the model's own forward, with a row per completion, or with each prompt computed once."""


class Probing:
    """Runs forwards without effect on counts, features and gradients of weights."""

    def __init__(self, rounds: Rounds, together: bool) -> None:
        """If `together`, ranks communicate within forwards, and so must make equal calls."""
        self.rounds = rounds
        self.together = together

    def probe(
        self,
        groups: Sequence[ScoredGroup],
        sharing: Sharing,
        has_gradient: bool,
        one_at_a_time: bool = False,
        rounding: float = 0.0,
    ) -> Probe:
        """Compute log-probs of the groups, and gradients if `has_gradient`. No weight keeps its gradient.

        `sharing` is how rows are laid out. With `one_at_a_time`, each forward has one completion. Embeddings are
        multiplied by 1 ± `rounding`. If ranks communicate within forwards, no rank has whole weights, and the gradient
        of embeddings is the only one.
        """
        policy, budget, weights, vision_apart = self.rounds.policy, 0 if one_at_a_time else None, set[int](), False
        with (
            torch.set_grad_enabled(has_gradient),  # which the schedule of a trained tower depends on
            self.apart(sharing),
            probed_embeddings(policy.transformer, rounding) as vector,
        ):
            probed = {"embeddings": vector}
            if has_gradient and not self.together:
                probed |= probed_weights(policy.transformer, policy.family)
            gradients = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in probed.items()}
            for work in self.schedule(groups, sharing, budget):
                batch = work.forward.batch
                with self.rounds.running(work):
                    logprobs_NT = policy(work.forward).logprobs_NT
                    if has_gradient:
                        weights |= weights_behind(logprobs_NT)
                        vision_apart |= any(subgroup.vision_apart for subgroup in batch.subgroups)
                        add_gradients(gradients, signed_sum(batch, logprobs_NT), probed)
                if not batch.is_dummy:
                    store_logprobs(batch, logprobs_NT.detach().float(), Stage.OLD_LOGPROBS)
        on_host = {name: gradient.cpu() for name, gradient in gradients.items()}
        return Probe(torch.cat(taken(groups)), on_host, frozenset(weights), vision_apart)

    @torch.no_grad()
    def logprobs(self, groups: Sequence[ScoredGroup], way: Way) -> list[Tensor]:
        """Compute the log-probs of each completion. The model's own forward takes single turns."""
        policy = self.rounds.policy
        with self.apart("dense" if way == "own" else way):
            for work in one_by_one(groups) if way == "own" else self.schedule(groups, way):
                with self.rounds.running(work):
                    logprobs_NT = policy(work.forward).logprobs_NT
                if not work.forward.batch.is_dummy:
                    store_logprobs(work.forward.batch, logprobs_NT.float(), Stage.OLD_LOGPROBS)
        return taken(groups)

    @torch.no_grad()
    def joined_difference(self, prompts: Sequence[Prompt]) -> float:
        """Run the vision tower on all prompts at once, and on each alone. Return how far features differ.

        It is the root mean square of the differences, relative to the features, for the prompt that differs most.
        """
        policy, vision = self.rounds.policy, self.rounds.policy.vision
        with self.apart("dense"), policy.autocast():
            apart = [vision.run([prompt])[prompt].tensors() for prompt in prompts]
            joined = [features.tensors() for features in vision.run(prompts).values()]
        pairs = zip(chain.from_iterable(joined), chain.from_iterable(apart), strict=True)
        return max(rms(ours.float() - theirs.float()) / max(rms(theirs.float()), TINY) for ours, theirs in pairs)

    def schedule(self, groups: Sequence[ScoredGroup], sharing: Sharing, budget: int | None = None) -> list[Round]:
        """Return the rounds of the groups in a layout."""
        vision = self.rounds.policy.vision
        return self.rounds.schedule(groups, groups[0], vision, self.together, sharing=sharing, budget=budget)

    @contextmanager
    def apart(self, sharing: Sharing) -> Iterator[None]:
        """Run forwards, and then restore counts and features. Dense rows have other shapes than a run compiles."""
        go_back = self.rounds.policy.mark()
        try:
            with torch.compiler.set_stance("force_eager" if sharing == "dense" else "default"):
                yield
        finally:
            go_back()


class CheckedRows:
    """Groups of a proof, whose log-probs are computed once in each way."""

    def __init__(self, probing: Probing, groups: list[ScoredGroup]) -> None:
        self.probing = probing
        self.groups = groups
        self.known: dict[Way, list[Tensor]] = {}

    def of_completions(self, way: Way) -> list[Tensor]:
        """Return the log-probs of each completion."""
        if way not in self.known:
            self.known[way] = self.probing.logprobs(self.groups, way)
        return self.known[way]

    def logprobs(self, way: Way) -> Tensor:
        """Return the log-probs of all completions, one after the other."""
        return torch.cat(self.of_completions(way))


def add_gradients(gradients: dict[str, Tensor], output: Tensor, inputs: dict[str, Tensor]) -> None:
    """Add the gradients of a scalar, by name. Inputs that it does not depend on have a gradient of 0."""
    found = torch.autograd.grad(output, list(inputs.values()), allow_unused=True)
    for total, gradient in zip(gradients.values(), found, strict=True):
        if gradient is not None:
            total += gradient


def one_by_one(groups: Sequence[ScoredGroup]) -> list[Round]:
    """Return a round of the model's own forward for each completion."""
    members = [(group, i) for group in groups for i in range(len(group.group.completions))]
    return [Round(Forward(MicroBatch([SubGroup(group, [i])], shared=False, own_forward=True))) for group, i in members]


def signed_sum(batch: MicroBatch, logprobs_NT: Tensor) -> Tensor:
    """Return a sum of log-probs with weights of both signs, which depend on each token and its position."""
    if batch.is_dummy:
        return 0.0 * logprobs_NT.sum()
    tokens_NT = pad_rows([c.token_ids for c in batch.completions])
    mask_NT = length_mask([len(c.token_ids) for c in batch.completions])
    weights_NT = torch.cos(tokens_NT + torch.arange(tokens_NT.shape[1])) * mask_NT
    return (to_device(weights_NT, logprobs_NT.device) * logprobs_NT).sum()
