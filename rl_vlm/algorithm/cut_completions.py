"""The loss of a completion whose contexts are in several micro-batches.

    completion                  context 1   context 2   context 3
    micro-batch of context 2    given       computed    given

Each micro-batch computes the loss of the whole completion, GSPO's ratio over all tokens included. The log-probs
of other contexts are given, without a gradient. By the chain rule, the gradients of the micro-batches add up to the
gradient of the completion. Each micro-batch adds its own tokens' share to the loss of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_vlm.algorithm.logprobs import join
from rl_vlm.config.schema import RunConfig
from rl_vlm.types import MicroBatch, PolicyOutput, pad_rows, to_device

Key = tuple[int, int]
"""The `id` of a scored group, and the index of a completion in it."""


class CutOutputs:
    """Outputs of the policy for all tokens of completions that are cut, without gradients and in host memory."""

    def __init__(self, outputs: Sequence[tuple[MicroBatch, PolicyOutput]] = ()) -> None:
        """Join the outputs of micro-batches, in order."""
        self.logprobs: dict[Key, Tensor] = {}
        self.entropies: dict[Key, Tensor] = {}
        for batch, output in outputs:
            for (scored, member, span), *rows in zip(batch.members, *output, strict=True):
                for found, values in zip((self.logprobs, self.entropies), rows, strict=True):
                    join(found, (id(scored), member), span, values)


def needs_all_tokens(config: RunConfig, batch: MicroBatch) -> bool:
    """Return whether the loss of a token depends on log-probs or entropies in other micro-batches.

    Without old log-probs the ratio of other tokens is 1.
    """
    if not batch.cuts_completions:
        return False
    algorithm, (scored, member, _) = config.algorithm, batch.members[0]
    is_first = member not in scored.old_logprobs
    is_corrected = config.rollout.is_off_policy and algorithm.vllm_importance_sampling_correction and is_first
    by_token = algorithm.top_entropy_quantile < 1 or (algorithm.beta > 0 and algorithm.use_bias_correction_kl)
    by_ratio = algorithm.importance_sampling_level == "sequence" and (by_token or is_corrected or not is_first)
    by_mismatch = is_corrected and algorithm.corrects_sequences
    return algorithm.has_own_loss or by_ratio or by_mismatch


def whole_output(batch: MicroBatch, output: PolicyOutput, cut: CutOutputs) -> PolicyOutput:
    """Return the output for all tokens of the completions.

    If `cut` has none for a completion, other tokens have old log-probs or the sampler's, which then affect no gradient.
    """
    given, entropies = [], []
    for (scored, member, _), completion in zip(batch.members, batch.whole.completions, strict=True):
        old = scored.old_logprobs.get(member, completion.generator_logprobs)
        given.append(cut.logprobs.get((id(scored), member), old))
        entropies.append(cut.entropies.get((id(scored), member), torch.zeros_like(old)))
    return PolicyOutput(placed(batch, output.logprobs_NT, given), placed(batch, output.entropies_NT, entropies))


def placed(batch: MicroBatch, values_NT: Tensor, others: Sequence[Tensor]) -> Float[Tensor, "completions tokens"]:
    """Return rows of whole completions: the values of the micro-batch's tokens, between other values."""
    rows = []
    for (_, _, span), own, values in zip(batch.members, values_NT, others, strict=True):
        other = to_device(values, own.device)
        rows.append(torch.cat([other[: span.start], own[: span.stop - span.start], other[span.stop :]]))
    return pad_rows(rows)


def own_tokens(batch: MicroBatch) -> Bool[Tensor, "completions tokens"]:
    """Return which tokens of the whole completions are in the micro-batch."""
    rows = [torch.zeros(len(completion.token_ids)).bool() for completion in batch.whole.completions]
    for row, (_, _, span) in zip(rows, batch.members, strict=True):
        row[span] = True
    return pad_rows(rows)
