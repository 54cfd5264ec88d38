"""Routed experts under autocast: transformers' loop over experts, which uses linear layers, is the reference."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText

from rl_vlm.model.experts import enable_autocast_experts
from tests.tiny.build import build_tiny

IDS = torch.arange(40, 72)[None]


class GroupedProducts(TorchDispatchMode):
    """Keeps the dtypes of both factors of each grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[tuple[torch.dtype, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.dtypes.add((args[0].dtype, args[1].dtype))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def model(tmp_path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(build_tiny("qwen3_vl_moe", tmp_path), dtype=torch.float32)


def logits_and_gradients(model: Any, enabled: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        logits = model(input_ids=IDS).logits.float()
    logits.square().mean().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if ".experts." in name}


def test_trained_experts_compute_in_16_bits(model: Any):
    model.set_experts_implementation({"text_config": "eager"})
    expected, of_loop = logits_and_gradients(model)
    model.set_experts_implementation({"text_config": "grouped_mm"})
    enable_autocast_experts(model)
    with GroupedProducts() as products:
        logits, gradients = logits_and_gradients(model)
    assert products.dtypes == {(torch.bfloat16, torch.bfloat16)}
    assert len(gradients) == 2 * len(model.model.language_model.layers)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
    for name, gradient in gradients.items():
        assert (gradient - of_loop[name]).norm() <= 0.03 * of_loop[name].norm()


def test_without_autocast_nothing_changes(model: Any):
    expected, of_experts = logits_and_gradients(model, enabled=False)
    enable_autocast_experts(model)
    logits, gradients = logits_and_gradients(model, enabled=False)
    assert torch.equal(logits, expected)
    assert all(torch.equal(gradients[name], of_experts[name]) for name in of_experts)


def test_models_without_experts_are_left_as_they_are(tmp_path):
    model: Any = AutoModelForImageTextToText.from_pretrained(build_tiny("qwen2_5_vl", tmp_path))
    enable_autocast_experts(model)
    assert model(input_ids=IDS).logits.isfinite().all()
