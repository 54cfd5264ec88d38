from math import tanh
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_vlm.model import softcap
from rl_vlm.model.softcap import capped_attention, final_logits


def expected_attention(query, key, value, mask, scale, bound):
    """Each row and head alone."""
    heads_per_key = query.shape[1] // key.shape[1]
    outputs = torch.empty(*query.shape[:3], value.shape[-1])
    for row in range(len(query)):
        for head in range(query.shape[1]):
            scores = query[row, head] @ key[row, head // heads_per_key].T * scale
            scores = (torch.tanh(scores / bound) * bound).masked_fill(~mask[row, 0], -torch.inf)
            outputs[row, head] = scores.softmax(-1) @ value[row, head // heads_per_key]
    return outputs


@pytest.mark.parametrize("scores_at_once", [1, 40, 2**20])
def test_attention_in_chunks_is_that_of_each_head(scores_at_once, monkeypatch):
    monkeypatch.setattr(softcap, "CHUNK_SCORES", scores_at_once)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    mask = torch.rand(2, 1, 5, 6) < 0.5
    mask[..., 0] = True
    expected = expected_attention(query, key, value, mask, 0.7, 0.5)
    ours = capped_attention(query, key, value, mask, 0.7, 0.5)
    torch.testing.assert_close(ours, expected)
    weights = torch.randn_like(expected)
    gradients, expected_gradients = (
        torch.autograd.grad((output * weights).sum(), inputs) for output in (ours, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients)


def test_without_a_mask_the_last_tokens_attend_causally():
    query, key, value = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    mask = torch.tensor([[[[True, True, True, False], [True, True, True, True]]]])
    expected = expected_attention(query, key, value, mask, 0.7, 0.5)
    torch.testing.assert_close(capped_attention(query, key, value, None, 0.7, 0.5), expected)


def test_a_query_that_attends_to_nothing_is_not_nan():
    tensors = [torch.randn(1, 1, 2, 8, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([[[[False, False], [True, False]]]])  # the first is padding
    output = capped_attention(tensors[0], tensors[1], tensors[2], mask, 0.7, 0.5)
    gradients = torch.autograd.grad(output.sum(), tensors)
    assert all(tensor.isfinite().all() for tensor in (output, *gradients))


def test_scores_in_bfloat16_are_bounded_in_float32():
    query, key, value = (torch.randn(1, 1, 64, 32, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    expected = expected_attention(query.float(), key.float(), value.float(), mask, 1.0, 5.0)
    ours = capped_attention(query, key, value, mask, 1.0, 5.0)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), expected, rtol=0.01, atol=0.02)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"final_logit_softcapping": 2.0}, [2 * tanh(0.5), 2 * tanh(-4.0)]),
        ({"final_logit_softcapping": None}, [1.0, -8.0]),
        ({"logits_scaling": 4.0}, [0.25, -2.0]),
        ({"logits_mup_width_multiplier": 4.0}, [0.25, -2.0]),
        ({"output_multiplier": 0.25}, [0.25, -2.0]),
        ({"output_multiplier": 0.5, "final_logit_softcapping": 2.0}, [2 * tanh(0.25), 2 * tanh(-2.0)]),
        ({}, [1.0, -8.0]),
    ],
)
def test_logits_are_bounded_as_the_language_models_config_says(text: dict[str, Any], expected: list[float]):
    assert final_logits(torch.tensor([1.0, -8.0]), model_with(text)).tolist() == pytest.approx(expected)


def test_a_scale_of_logits_that_the_model_does_not_read_is_ignored():
    """Cohere 2 Vision has such a scale in the config of its language model, Cohere Compass also in the model."""
    logits = torch.tensor([1.0, -8.0])
    assert final_logits(logits, model_with({"logit_scale": 0.5})).tolist() == [1.0, -8.0]
    assert final_logits(logits, model_with({"logit_scale": 0.5}, logit_scale=0.5)).tolist() == [0.5, -4.0]


def model_with(text: dict[str, Any], **own: float) -> Any:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**text))
    return SimpleNamespace(config=config, **own)
