"""FlexAttention on a CPU: one compiled call over the whole row, with gradients, as in a run on a GPU.

The compiler traces the call and its backward. PyTorch's own operators compute them, by the mask's rule alone: blocks of
the mask and options of kernels have no effect. `interpreted_attention.py` runs the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rl_vlm.model import shared_prefix
from rl_vlm.model.block_masks import BLOCK, make_block_mask

Attend = Callable[..., Any]
"""FlexAttention, or a wrong one: (query, key, value, score_mod, block mask, scale) -> output."""


def unchanged(attend: Attend) -> Attend:
    return attend


def use_flex_attention(monkeypatch: pytest.MonkeyPatch, change: Callable[[Attend], Attend] = unchanged) -> None:
    """Let FlexAttention, or a change of it, compute shared rows on this CPU. Forget what was compiled before."""
    torch._dynamo.reset()
    counters.clear()
    attend = change(torch.compile(flex_attention, dynamic=True, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr(shared_prefix, "has_kernels", lambda device: True)
    monkeypatch.setattr(shared_prefix, "compiled_flex_attention", lambda: attend)


def num_graphs() -> int:
    """Return the number of graphs that were compiled since `use_flex_attention`."""
    return counters["stats"]["unique_graphs"]


def mask_off_by_a_block(attend: Attend) -> Attend:
    """Each query sees the keys of the block before."""

    def wrong(query: Tensor, key: Tensor, value: Tensor, cap: Any, mask: BlockMask, scale: float, **kwargs: Any) -> Any:
        rule, length = mask.mask_mod, query.shape[2]
        shifted = make_block_mask(lambda b, h, q, k: rule(b, h, q, (k + BLOCK) % length) | (q == k), length, key.device)
        return attend(query, key, value, cap, shifted, scale, **kwargs)

    return wrong


def scale_left_out(attend: Attend) -> Attend:
    return lambda query, key, value, cap, mask, scale, **kwargs: attend(query, key, value, cap, mask, 1.0, **kwargs)


def groups_of_heads_swapped(attend: Attend) -> Attend:
    """Query heads get the keys and values of another key head."""
    return lambda query, key, value, *args, **kwargs: attend(query, key.flip(1), value.flip(1), *args, **kwargs)


def soft_cap_dropped(attend: Attend) -> Attend:
    return lambda query, key, value, cap, *args, **kwargs: attend(query, key, value, None, *args, **kwargs)


def rotary_in_bfloat16(attend: Attend) -> Attend:
    """Rotated queries and keys are rounded to bfloat16."""

    def wrong(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key = (x.to(torch.bfloat16).to(x.dtype) for x in (query, key))
        return attend(query, key, *args, **kwargs)

    return wrong


def captured_tensors_of_another_row(attend: Attend) -> Attend:
    """The mask's rule keeps the tensors of the first row."""
    masks: list[BlockMask] = []

    def wrong(query: Tensor, key: Tensor, value: Tensor, cap: Any, mask: BlockMask, scale: float, **kwargs: Any) -> Any:
        masks.append(mask)
        stale = make_block_mask(masks[0].mask_mod, query.shape[2], query.device)
        return attend(query, key, value, cap, stale, scale, **kwargs)

    return wrong


def half_of_key_gradients(attend: Attend) -> Attend:
    """The forward is right."""
    return lambda query, key, *args, **kwargs: attend(query, (key + key.detach()) / 2, *args, **kwargs)
