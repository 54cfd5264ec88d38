"""Sampling of tokens from logits, with random numbers that do not depend on the rest of the batch.

    logits ─ temperature, ban ─► log-probs ─ top-k, top-p, min-p ─► kept tokens ─ one uniform ─► token

Every completion has its own stream of uniforms, one per token position, from a counter-based generator. The
generator has no state, so the order, the batching and the number of processes do not change the tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from rl_vlm.config.schema import RunConfig
from rl_vlm.types import Sampling, to_device


def sampling_params(
    config: RunConfig, num_generations: int, temperature: float, max_rollout_tokens: int | None = None
) -> Sampling:
    """Build the sampling settings. Arguments other than `config` differ between training and evaluation."""
    rollout = config.rollout
    return Sampling(
        num_generations=num_generations,
        max_completion_length=rollout.max_completion_length,
        temperature=temperature,
        seed=config.train.seed,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_rollout_tokens=max_rollout_tokens,
    )


def stream_keys(seed: int, group_id: str, num: int) -> Int64[Tensor, " num"]:
    """Return the random-stream key of each completion of a group: a hash of (seed, group id, completion index)."""
    digests = [hashlib.blake2b(f"{seed}/{group_id}/{index}".encode(), digest_size=8).digest() for index in range(num)]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=torch.int64)


def uniforms(
    keys_N: Int64[Tensor, " completions"], positions_N: Int64[Tensor, " completions"]
) -> Float64[Tensor, " completions"]:
    """Compute the uniform in [0, 1) of each stream at its token position.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) with the stream's key as its seed; int64 arithmetic wraps around.
    """
    z = keys_N + (positions_N + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    """Return the low 64 bits of an integer, read as int64."""
    return (value + 2**63) % 2**64 - 2**63


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift right logically: `>>` on int64 would copy the sign bit."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def token_distribution(
    logits_NV: Float[Tensor, "completions vocabulary"], temperature: float, banned: Int64[Tensor, " banned"]
) -> Float[Tensor, "completions vocabulary"]:
    """Compute fp32 log-probs after temperature, with banned tokens at -inf. Used for `generator_logprobs`."""
    return (logits_NV.float() / temperature).index_fill_(-1, banned, -torch.inf).log_softmax(-1)


def truncate(
    logprobs_NV: Float[Tensor, "completions vocabulary"], top_k: int, top_p: float, min_p: float | None
) -> Float[Tensor, "completions vocabulary"]:
    """Set tokens outside of top-k, then of top-p, then of min-p to -inf. The rest is not renormalised.

    Keeps the same tokens as transformers' logits warpers in the order of `generate`.
    """
    if 0 < top_k < logprobs_NV.shape[-1]:
        smallest_kept = logprobs_NV.topk(top_k).values[:, -1:]
        logprobs_NV = logprobs_NV.masked_fill(logprobs_NV < smallest_kept, -torch.inf)
    if top_p < 1:
        ascending, order = logprobs_NV.sort(dim=-1)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        logprobs_NV = logprobs_NV.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    if min_p:
        smallest_kept = logprobs_NV.amax(-1, keepdim=True) + math.log(min_p)
        logprobs_NV = logprobs_NV.masked_fill(logprobs_NV < smallest_kept, -torch.inf)
    return logprobs_NV


def draw(
    logprobs_NV: Float[Tensor, "completions vocabulary"], uniforms_N: Float64[Tensor, " completions"]
) -> Int64[Tensor, " completions"]:
    """Sample tokens by inverse CDF in float64, never one of probability 0. Log-probs need not be normalised."""
    probs = logprobs_NV.double().exp()
    cdf = probs.cumsum(-1)
    token_ids = torch.searchsorted(cdf, uniforms_N[:, None] * cdf[:, -1:], right=True)
    token_ids = token_ids.clamp(max=probs.shape[-1] - 1)
    # If a uniform is close to 1, rounding can point past the last token of the distribution.
    return torch.where(probs.gather(-1, token_ids) > 0, token_ids, probs.argmax(-1, keepdim=True))[:, 0]


def next_tokens(
    logits_NV: Float[Tensor, "completions vocabulary"],
    keys_N: Int64[Tensor, " completions"],
    positions_N: Int64[Tensor, " completions"],
    sampling: Sampling,
    banned: Int64[Tensor, " banned"],
) -> tuple[Int64[Tensor, " completions"], Float[Tensor, " completions"]]:
    """Return each completion's next token and generator log-prob. Temperature 0 takes the log-prob at temperature 1.

    `positions_N` are the numbers of tokens that each completion has sampled so far.
    """
    logprobs_NV = token_distribution(logits_NV, sampling.temperature or 1.0, banned)
    if sampling.temperature == 0:
        token_ids = logprobs_NV.argmax(-1)
    else:
        kept_NV = truncate(logprobs_NV, sampling.top_k, sampling.top_p, sampling.min_p)
        token_ids = draw(kept_NV, uniforms(keys_N, positions_N))
    return token_ids, logprobs_NV.gather(-1, token_ids[:, None])[:, 0]


class EndOfTurn:
    """Finds the ends of N turns: a stop token, a stop sequence, or a limit."""

    def __init__(
        self,
        stop_token_ids: Sequence[int],
        stop_sequences: Sequence[Sequence[int]],
        limits: Sequence[int],
        device: torch.device,
    ) -> None:
        self.stop_token_ids = torch.tensor(list(stop_token_ids))
        self.on_device = self.stop_token_ids.to(device)
        self.sequences = [torch.tensor(list(sequence)) for sequence in stop_sequences]
        self.sequences_on_device = [sequence.to(device) for sequence in self.sequences]
        self.limits = torch.tensor(list(limits))
        self.unlike_limits = to_device(self.limits, device) if len(set(limits)) > 1 else None

    def after(
        self, step: int, tokens: Int[Tensor, " rows"], rows: Int[Tensor, " rows"], tokens_NT: Int[Tensor, "all tokens"]
    ) -> Bool[Tensor, " rows"]:
        """Return which of some rows end with the tokens of this step, the last ones in `tokens_NT`."""
        found = torch.isin(tokens, self.on_device)
        if self.unlike_limits is not None:
            found = found | (self.unlike_limits[rows] <= step + 1)
        for sequence in self.sequences_on_device:
            if step + 1 >= len(sequence):
                found = found | (tokens_NT[rows, step + 1 - len(sequence) : step + 1] == sequence).all(-1)
        return found

    def lengths(self, tokens_NT: Int[Tensor, "completions tokens"]) -> tuple[list[int], list[bool]]:
        """Return the number of tokens of each row, and whether it ends before its limit or by a stop at it."""
        is_end_NT = torch.isin(tokens_NT, self.stop_token_ids)
        for sequence in self.sequences:
            if tokens_NT.shape[1] >= len(sequence):
                matches = (tokens_NT.unfold(1, len(sequence), 1) == sequence).all(-1)
                is_end_NT[:, len(sequence) - 1 :] |= matches
        first_N = torch.where(is_end_NT.any(dim=1), is_end_NT.int().argmax(dim=1) + 1, tokens_NT.shape[1] + 1)
        return torch.minimum(first_N, self.limits).tolist(), (first_N <= self.limits).tolist()
