"""Soft caps: models can bound their attention scores and their logits (Gemma 2, arXiv:2408.00118, section 2).

    attention   softmax(mask(cap(query · key · scale))) · value
    logits      cap(LM head)                                          cap(x) = bound · tanh(x / bound)

SDPA cannot compute this attention. FlexAttention can, with a `score_mod`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_SCORES = 2**24
"""Number of scores (rows x heads x queries x keys) that are computed at once: 64 MiB in float32."""

LOGIT_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Names in configs of language models for a number that divides logits (Granite, Inkling)."""
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's change of a score: (score, batch, head, query position, key position) -> score."""


def capped_attention(
    query: Float[Tensor, "rows heads queries dim"],
    key: Float[Tensor, "rows kv_heads keys dim"],
    value: Float[Tensor, "rows kv_heads keys value_dim"],
    mask: Bool[Tensor, "#rows 1 queries keys"] | None,
    scale: float,
    softcap: float,
) -> Float[Tensor, "rows heads queries value_dim"]:
    """Compute attention with a soft cap, in chunks of queries. The backward pass recomputes each chunk's scores.

    `mask` is True where a query attends to a key. None means causal attention of the last tokens among the keys.
    """
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    at_once = chunk_size(query, key)
    outputs = [
        checkpoint(chunk_attention, *chunk, key, value, scale, softcap, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(query.split(at_once, dim=2), mask.split(at_once, dim=2), strict=True)
    ]
    return torch.cat(outputs, dim=2)


def chunk_size(query: Tensor, key: Tensor) -> int:
    """Return the number of queries whose scores are computed at once."""
    rows, heads = query.shape[:2]
    return max(1, CHUNK_SCORES // (rows * heads * key.shape[2]))


def chunk_attention(query: Tensor, mask: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float) -> Tensor:
    """Compute `capped_attention` of some queries at once."""
    return weighted_values(chunk_scores(query, mask, key, scale, softcap).softmax(-1), value)


def weighted_values(
    weights: Float[Tensor, "rows kv_heads heads queries keys"], value: Float[Tensor, "rows kv_heads keys value_dim"]
) -> Float[Tensor, "rows all_heads queries value_dim"]:
    """Sum values by the weights of a softmax. All heads follow one another."""
    products = weights.to(value.dtype).flatten(2, 3) @ value
    return products.unflatten(2, (-1, weights.shape[3])).flatten(1, 2)


def chunk_scores(
    query: Tensor, mask: Tensor, key: Tensor, scale: float, softcap: float | None
) -> Float[Tensor, "rows kv_heads heads queries keys"]:
    """Compute the scores of some queries with a soft cap, if there is one, in float32, as in fused kernels."""
    kv_heads, queries = key.shape[1], query.shape[2]
    of_kv_head = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # so that keys and values are not repeated
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        scores = of_kv_head.to(dtype) @ key.mT.to(dtype) * scale
    scores = scores if softcap is None else soft_capped(scores, softcap)
    return scores.unflatten(2, (-1, queries)).masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)


@cache
def score_cap(softcap: float, device: torch.device) -> ScoreMod:
    """Return the soft cap as a `score_mod`. It is the same function in each forward, so it is compiled once.

    The bound is a tensor, since FlexAttention cannot be compiled for dynamic lengths with a float from a closure.
    """
    bound = torch.full((), softcap, device=device)
    return lambda score, b, h, q, k: bound * torch.tanh(score / bound)


def final_logits(logits: Tensor, model: PreTrainedModel) -> Tensor:
    """Apply the scale and the soft cap of the language model's config to the LM head's output, if there are any.

    transformers' own forward of PaliGemma 2 omits the soft cap before 5.24. The forward of Gemma 3 still does.
    """
    scale = logit_scale(model)
    return with_soft_cap(logits if scale == 1 else logits * scale, model)


def with_soft_cap(logits: Tensor, model: PreTrainedModel) -> Tensor:
    """Apply the soft cap of the language model's config to logits, if there is one."""
    bound = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if bound is None else soft_capped(logits, bound)


def logit_scale(model: PreTrainedModel) -> float:
    """Return the factor of logits.

    Cohere's is read from the model, since Cohere 2 Vision and Aya Vision ignore the one in the language model's config.
    """
    text = model.config.get_text_config()
    divisors = [getattr(text, name, None) or 1.0 for name in LOGIT_DIVISORS]
    factors = [getattr(text, "output_multiplier", None) or 1.0, getattr(model, "logit_scale", None) or 1.0]
    return prod(factors) / prod(divisors)


def soft_capped(values: Tensor, bound: float) -> Tensor:
    """Bound values smoothly to ± `bound`."""
    return bound * torch.tanh(values / bound)
