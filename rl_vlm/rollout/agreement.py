"""A check that the rollout engine and the policy compute the same log-probs for the same tokens.

    before the first update ─► after the first trained weights are sent ─► every `agreement_steps` steps

An adapter changes nothing before the first update, so the first check cannot see that an engine ignores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.errors import RolloutError
from rl_vlm.rollout.engine import SyncedEngine
from rl_vlm.rollout.sampling import sampling_params
from rl_vlm.rollout.window import PolicyOutputs
from rl_vlm.types import MicroBatch, PolicyOutput, Progress, RolloutRequest, ScoredGroup, length_mask, pad_rows

NUM_CHECKED_GROUPS = 2
MAX_CHECKED_TOKENS = 64


@dataclass(frozen=True)
class Agreement:
    """A check that passed."""

    step: int
    """Number of complete steps before it."""
    policy_version: int
    mean: float
    """Mean absolute difference of the log-probs of this rank's tokens."""


class AgreementCheck:
    """Compares an engine that has its own copy of the weights with the policy, at the steps at which it is due."""

    def __init__(self, config: RunConfig, ranks: Collectives, engine: SyncedEngine) -> None:
        self.config = config
        self.ranks = ranks
        self.engine = engine
        self.first: Agreement | None = None
        self.last: Agreement | None = None

    def is_due(self, progress: Progress) -> bool:
        """Return whether to check before this step's passes. The engine must have the policy's latest weights."""
        rollout = self.config.rollout
        if rollout.facts.samples_from_policy or self.engine.sent_version != progress.policy_version:
            return False
        if self.last is None:
            return True
        if not rollout.agreement_steps:
            return False
        if self.last.policy_version == 0:
            return progress.policy_version > 0
        return progress.global_step - self.last.step >= rollout.agreement_steps

    def run(self, progress: Progress, groups: Sequence[ScoredGroup], policy_outputs: PolicyOutputs) -> None:
        """Raise RolloutError on every rank if the engine's log-probs differ from the policy's.

        Samples short new completions for the prompts of a few `groups`, since their completions may come from older
        weights. `policy_outputs` computes the policy's outputs by micro-batch. All ranks must call it.
        """
        rollout = self.config.rollout
        sampling = replace(
            sampling_params(self.config, rollout.num_generations, rollout.temperature),
            max_completion_length=min(rollout.max_completion_length, MAX_CHECKED_TOKENS),
        )
        requests = [RolloutRequest(f"check/{g.group.group_id}", g.group.prompt) for g in groups[:NUM_CHECKED_GROUPS]]
        with self.ranks.agree(), self.engine.gathered():
            generated = self.engine.generate(requests, sampling)
        self.engine.sleep()
        fresh = [
            replace(scored, group=group, valid_G=torch.ones_like(scored.valid_G))  # old reward faults do not count
            for scored, group in zip(groups, generated, strict=False)
        ]
        gaps = torch.cat([logprob_gaps(batch, output) for batch, output in policy_outputs(fresh)])
        with self.ranks.agree():
            self.check_gaps(gaps, progress)
        self.last = Agreement(progress.global_step, progress.policy_version, gaps.mean().item())
        self.first = self.first or self.last

    def check_gaps(self, gaps: Tensor, progress: Progress) -> None:
        """Raise RolloutError if the mean gap is above the bound."""
        mean, largest, bound = gaps.mean().item(), gaps.max().item(), self.config.vllm.vllm_max_logp_difference
        if mean <= bound:
            return
        which, before = "the first rollouts", ""
        advice = "Are model, precision (model.dtype) and pixel limits the same on both sides?"
        if progress.policy_version > 0:
            which = f"rollouts before step {progress.global_step + 1}"
            advice = "Does the generator have the trained weights, the adapter included?"
        if self.first is not None:
            before = f" The mean was {self.first.mean:.3g} at the first check, before step {self.first.step + 1}."
        raise RolloutError(
            f"Log-probs of {which} differ between generator and trainer by {mean:.3g} in the mean and {largest:.3g} at "
            f"most; vllm.vllm_max_logp_difference allows a mean of {bound:g}.{before} {advice} Some difference is "
            "normal in bfloat16."
        )


def logprob_gaps(batch: MicroBatch, output: PolicyOutput) -> Tensor:
    """Return the absolute difference between the engine's and the policy's log-prob of each token."""
    device = output.logprobs_NT.device
    mask = length_mask([len(c.token_ids) for c in batch.completions], device)
    logprobs_NT = pad_rows([c.generator_logprobs for c in batch.completions]).to(device)
    return (output.logprobs_NT - logprobs_NT)[mask].abs()
