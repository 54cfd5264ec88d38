"""Trace attention over packed rows as on a GPU, where FlexAttention or FlashAttention replace two SDPA calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rl_vlm.config.schema import SharedAttention
from rl_vlm.model import shared_prefix
from rl_vlm.model.shared_prefix import MaskFunction, RowLayout


class KeptByFlexAttention(torch.autograd.Function):
    """Keeps the tensors of FlexAttention for its backward: query, key, value, output and each row's log-normalizer."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])  # (row, heads, value_dim)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:2], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, output, log_normalizer = ctx.saved_tensors
        del output
        row_sums = torch.empty_like(log_normalizer)  # of the output times its gradient
        made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del row_sums
        return made


@contextmanager
def attention_as_on_gpu() -> Iterator[None]:
    """Trace packed rows in this context as on a GPU, without masks of tokens by tokens."""

    def without_masks(layout: RowLayout, mask_function: MaskFunction, setting: SharedAttention = "auto") -> RowLayout:
        return layout

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: None, scale: float, softcap: float | None) -> Tensor:
        return KeptByFlexAttention.apply(query.to(value.dtype), key.to(value.dtype), value)

    with (
        mock.patch.object(RowLayout, "with_masks", without_masks),
        mock.patch.object(shared_prefix, "block_attention", attention),
    ):
        yield
