"""A check that the rollout engine and the policy compute the same log-probs for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.errors import RolloutError
from rl_vlm.rollout.engine import SyncedEngine
from rl_vlm.rollout.sampling import sampling_params
from rl_vlm.rollout.window import Outputs
from rl_vlm.types import MicroBatch, PolicyOutput, RolloutRequest, ScoredGroup, length_mask, pad_rows

NUM_CHECKED_GROUPS = 2
MAX_CHECKED_TOKENS = 64


def check_agreement(
    config: RunConfig,
    ranks: Collectives,
    engine: SyncedEngine,
    groups: Sequence[ScoredGroup],
    policy_outputs: Outputs,
) -> None:
    """Raise RolloutError on every rank if the engine's log-probs differ from the policy's.

    Samples short new completions for the prompts of a few `groups`, since their completions may come from older
    weights. `policy_outputs` computes the policy's outputs by micro-batch. All ranks must call it.
    """
    rollout = config.rollout
    sampling = replace(
        sampling_params(config, rollout.num_generations, rollout.temperature),
        max_completion_length=min(rollout.max_completion_length, MAX_CHECKED_TOKENS),
    )
    requests = [RolloutRequest(f"check/{g.group.group_id}", g.group.prompt) for g in groups[:NUM_CHECKED_GROUPS]]
    with ranks.agree(), engine.gathered():
        generated = engine.generate(requests, sampling)
    fresh = [
        replace(scored, group=group, valid_G=torch.ones_like(scored.valid_G))  # old reward faults do not count
        for scored, group in zip(groups, generated, strict=False)
    ]
    gaps = torch.cat([logprob_gaps(batch, output) for batch, output in policy_outputs(fresh)])
    with ranks.agree():
        check_gaps(gaps, config.vllm.vllm_max_logp_difference)


def logprob_gaps(batch: MicroBatch, output: PolicyOutput) -> Tensor:
    """Return the absolute difference between the engine's and the policy's log-prob of each token."""
    device = output.logprobs_NT.device
    mask = length_mask([len(c.token_ids) for c in batch.completions], device)
    logprobs_NT = pad_rows([c.generator_logprobs for c in batch.completions]).to(device)
    return (output.logprobs_NT - logprobs_NT)[mask].abs()


def check_gaps(gaps: Tensor, bound: float) -> None:
    """Raise RolloutError if the mean gap is above the bound."""
    mean, largest = gaps.mean().item(), gaps.max().item()
    if not mean <= bound:
        raise RolloutError(
            f"Log-probs of the first rollouts differ between generator and trainer by {mean:.3g} in the mean and "
            f"{largest:.3g} at most; vllm.vllm_max_logp_difference allows a mean of {bound:g}. Are model, precision "
            "(model.dtype) and pixel limits the same on both sides? Some difference is normal in bfloat16."
        )
