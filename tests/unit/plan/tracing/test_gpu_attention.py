"""Attention as on a GPU: what it keeps, and that nothing stays patched."""

import pytest
import torch

from rl_vlm.model import shared_prefix
from rl_vlm.model.shared_prefix import RowLayout
from rl_vlm.passes.peaks import Peaks
from rl_vlm.plan.tracing.fake import fake_tensors
from rl_vlm.plan.tracing.gpu_attention import KeptByFlexAttention, attention_as_on_gpu

TOKENS, HEADS, KEY_HEADS, WIDTH = 10, 6, 2, 16


def test_kept_tensors_and_gradients():
    with fake_tensors() as live:
        query = torch.empty(HEADS, TOKENS, WIDTH, requires_grad=True)
        key = torch.empty(KEY_HEADS, TOKENS, WIDTH, requires_grad=True)
        value = torch.empty(KEY_HEADS, TOKENS, WIDTH, requires_grad=True)
        with Peaks(live).block() as forward:
            output = KeptByFlexAttention.apply(query, key, value)
        assert output.shape == (TOKENS, HEADS, WIDTH)
        # The output, and a float32 per head and token. Query, key and value exist already.
        assert forward.after - forward.before == 4 * TOKENS * HEADS * (WIDTH + 1)
        output.sum().backward()
        for tensor in (query, key, value):
            assert tensor.grad is not None
            assert tensor.grad.shape == tensor.shape


def test_nothing_stays_patched():
    def patched():
        return RowLayout.with_masks, shared_prefix.block_attention

    before = patched()
    with attention_as_on_gpu():
        assert all(a is not b for a, b in zip(patched(), before, strict=True))
    assert patched() == before
    with pytest.raises(ZeroDivisionError), attention_as_on_gpu():
        raise ZeroDivisionError
    assert patched() == before
