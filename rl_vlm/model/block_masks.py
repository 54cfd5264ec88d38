"""Block masks for FlexAttention over long rows.

PyTorch's `create_block_mask` evaluates a rule for all pairs of tokens at once, which takes some 10 bytes per pair: 11
GB for a row of 32,768 tokens. Here the rule is evaluated in strips.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Tokens of a block, as in `create_block_mask`."""
STRIP_ELEMENTS = 2**23
"""Pairs of tokens for which the rule is evaluated at once."""

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes (batch, head, query, key), which broadcast, and returns whether the query may attend to the key."""


def make_block_mask(rule: MaskRule, length: int, device: torch.device) -> BlockMask:
    """Build the same block mask as `create_block_mask` for a row of `length` tokens, with bounded memory."""
    num_blocks = -(-length // BLOCK)
    index = torch.arange(num_blocks * BLOCK, device=device)
    is_token, index, zero = index < length, index.clamp(max=length - 1), index.new_zeros(())
    strip = BLOCK * max(1, STRIP_ELEMENTS // (BLOCK * len(index)))
    counts = []
    for start in range(0, len(index), strip):
        queries = slice(start, start + strip)
        allowed = rule(zero, zero, index[queries, None], index) & is_token[queries, None] & is_token
        counts.append(allowed.view(-1, BLOCK, num_blocks, BLOCK).sum(dim=(1, 3), dtype=torch.int32))
    count = torch.cat(counts)[None, None]
    full = count == BLOCK * BLOCK
    return BlockMask.from_kv_blocks(
        *in_order((count > 0) & ~full), *in_order(full), BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(length, length)
    )


def in_order(
    chosen: Bool[Tensor, "1 1 queries keys"],
) -> tuple[Int[Tensor, "1 1 queries"], Int[Tensor, "1 1 queries keys"]]:
    """Return the number of chosen key blocks per query block, and all key blocks with the chosen ones first."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)
