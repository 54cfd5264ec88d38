"""Attention over a causal packed row by the kernels of FlashAttention, which PyTorch has for 16-bit numbers on CUDA.

    each prefix and completion to itself, causal     one call, with as many sequences as there are parts of the row
    completions to their prefix                      one call, in which all completions of a prompt are one sequence

The softmax over both sets of keys is joined by the calls' log-sum-exps. Each call's backward takes the joint output and
log-sum-exp, so it returns the gradients of the joint softmax, as ring attention does (Liu et al., 2023,
https://arxiv.org/abs/2310.01889). The kernels compute FlashAttention-2 (Dao, 2023,
https://arxiv.org/abs/2307.08691). Nothing is compiled, and no mask is made. The backward adds gradients of queries in
no fixed order, so two runs differ by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_vlm.model.flex_kernels import LARGE_HEAD, LARGEST_PLAIN_HEAD, ROOMY, shared_memory_of
from rl_vlm.types import to_device

OLDEST = (8, 0)
"""Compute capability from which cards have the kernels: an A100, and an RTX 3090 with 8.6."""


@dataclass(frozen=True)
class Sequences:
    """Sequences that follow each other in a tensor."""

    starts: Int[Tensor, " starts"]
    """The first place of each, and the end of the last, as 32-bit numbers."""
    longest: int

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Sequences:
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return Sequences(to_device(starts, device), max(lengths))


@dataclass(frozen=True)
class FlashRow:
    """The sequences of a packed row, and where they are in it."""

    parts: Sequences
    """All prefixes and completions, in the order of the row."""
    prefixes: Sequences
    completions: Sequences
    """All completions of a prompt are one sequence."""
    prefix_rows: Int[Tensor, " prefix_tokens"]
    completion_rows: Int[Tensor, " completion_tokens"]

    @staticmethod
    def build(sections: Sequence[Sequence[int]], device: torch.device) -> FlashRow:
        """Describe a row. A section has the number of tokens of a prefix, and then of each of its completions."""
        lengths = [length for section in sections for length in section]
        is_prefix = torch.tensor([place == 0 for section in sections for place in range(len(section))])
        in_prefix = is_prefix.repeat_interleave(torch.tensor(lengths))
        return FlashRow(
            Sequences.of(lengths, device),
            Sequences.of([section[0] for section in sections], device),
            Sequences.of([sum(section[1:]) for section in sections], device),
            to_device(in_prefix.nonzero()[:, 0], device),
            to_device((~in_prefix).nonzero()[:, 0], device),
        )


@cache
def has_flash(device: torch.device) -> bool:
    """Return whether PyTorch has the kernels for a device."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= OLDEST


def fits_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernels take tensors of these heads (the last dimension), in the dtype of `value`.

    For heads of more than 192 values, the backward needs the shared memory of an A100 or an H100.
    """
    head = value.shape[-1]
    largest = LARGE_HEAD if shared_memory_of(value.device) >= ROOMY else LARGEST_PLAIN_HEAD
    is_plain = query.shape[-1] == key.shape[-1] == head and head % 8 == 0 and head <= largest
    return is_plain and value.dtype in (torch.bfloat16, torch.float16)


def flash_attention(
    query: Float[Tensor, "row heads dim"],
    key: Float[Tensor, "row kv_heads dim"],
    value: Float[Tensor, "row kv_heads dim"],
    row: FlashRow,
    scale: float,
) -> Float[Tensor, "row heads dim"]:
    """Compute attention over a packed row: each prefix to itself, each completion to its prefix and itself."""
    return JoinedAttention.apply(query.to(value.dtype), key.to(value.dtype), value, row, scale)


class JoinedAttention(torch.autograd.Function):
    """The two calls of a packed row, under one softmax."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: FlashRow, scale: float) -> Tensor:
        output, log_sums = flash_forward(query, key, value, row.parts, row.parts, scale, is_causal=True)
        if row.completions.longest:
            prefix, places = row.prefix_rows, row.completion_rows
            further, log_further = flash_forward(
                query[places], key[prefix], value[prefix], row.completions, row.prefixes, scale, is_causal=False
            )
            own, log_own = output[places], log_sums[:, places]
            share = torch.sigmoid(log_further - log_own).T[..., None]  # of the prefix in the joint softmax
            output[places] = torch.lerp(own.to(share.dtype), further.to(share.dtype), share).to(output.dtype)
            log_sums[:, places] = torch.logaddexp(log_own, log_further)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.row, ctx.scale = row, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        row, scale, gradient = ctx.row, ctx.scale, gradients[0].contiguous()
        found = flash_backward(
            gradient, query, key, value, output, log_sums, row.parts, row.parts, scale, is_causal=True
        )
        if row.completions.longest:
            prefix, places = row.prefix_rows, row.completion_rows
            further = flash_backward(
                gradient[places], query[places], key[prefix], value[prefix], output[places],
                log_sums[:, places].contiguous(), row.completions, row.prefixes, scale, is_causal=False,
            )  # fmt: skip
            for whole, some, added in zip(found, (places, prefix, prefix), further, strict=True):
                whole.index_add_(0, some, added)
        return *found, None, None


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, queries: Sequences, keys: Sequences, scale: float, is_causal: bool
) -> tuple[Float[Tensor, "tokens heads dim"], Float[Tensor, "heads tokens"]]:
    """Return the attention of each sequence of queries to its keys, and the log-sum-exps of its scores."""
    longest = max(2, queries.longest)  # with 1, the kernel would need one query of each sequence
    output, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, queries.starts, keys.starts, longest, keys.longest, 0.0, is_causal, False, scale=scale
    )
    return output, log_sums


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    queries: Sequences,
    keys: Sequences,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of dropout
    return torch.ops.aten._flash_attention_backward(
        gradient, query, key, value, output, log_sums, queries.starts, keys.starts, queries.longest, keys.longest,
        0.0, is_causal, unused, unused, scale=scale,
    )  # fmt: skip
