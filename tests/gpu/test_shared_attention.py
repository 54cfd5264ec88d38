"""The group-shared row on a CUDA device against one padded row per completion.

FlexAttention computes it, or FlashAttention or two calls of SDPA.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.masking_utils import causal_mask_function

from rl_vlm.model.flex_kernels import compiled_flex_attention
from rl_vlm.model.fused import compile_layers
from rl_vlm.model.policy import Policy
from rl_vlm.model.shared_prefix import RowLayout, enable_shared_rows, shared_attention
from rl_vlm.types import Forward, ScoredGroup
from tests.helpers.builders import (
    gradient_error,
    make_group,
    make_policy,
    make_prompt,
    noise_image,
    sharp_checkpoint,
    take_gradients,
    whole,
)
from tests.helpers.sharded_runs import distance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = [
    "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "gemma3", "gemma4", "paligemma", "paligemma2", "internvl",
    "llava_next", "qwen3_5", "lfm2_vl",
]  # fmt: skip
"""Causal rows, deepstack features, experts, a position table, sliding windows with bidirectional images (Gemma), a
bidirectional prefix, soft caps, 1-D positions, tiles, states of linear attention and of convolutions."""
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointing": {"gradient_checkpointing": True},
    "lora": {"use_peft": True, "lora_r": 4, "freeze_vision_tower": True},
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of each family, whose tests share what is compiled."""
    forget_compiled()
    return sharp_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def plain_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float32 without TF32, in which PyTorch computes convolutions."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def forget_compiled() -> None:
    torch._dynamo.reset()
    compiled_flex_attention.cache_clear()


def make_groups(checkpoint: Path) -> list[ScoredGroup]:
    """Two prompts in a row, which is longer than a block of 128 and no multiple of it."""
    return [
        make_group(make_prompt(checkpoint, [noise_image(32, 24, seed=1)]), [5, 1, 9, 130]),
        make_group(make_prompt(checkpoint, [noise_image(64, 48, seed=2)]), [60, 2], seed=1),
    ]


def scores(policy: Policy, groups: list[ScoredGroup], shared: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = policy(Forward(whole(groups, shared))).logprobs_NT
    (logprobs * torch.linspace(-1, 1, logprobs.numel(), device=logprobs.device).view_as(logprobs)).sum().backward()
    return logprobs.detach().cpu(), take_gradients(policy)


def exact_scores(policy: Policy, groups: list[ScoredGroup]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Score dense rows in float64, for which there are no grouped products of experts."""
    if getattr(policy.transformer.config.get_text_config(), "_experts_implementation", None):
        policy.transformer.set_experts_implementation({"text_config": "eager"})
    logprobs, gradients = scores(policy.double(), groups, shared=False)
    return logprobs.float(), {name: gradient.float() for name, gradient in gradients.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_rows_are_as_exact_as_dense_rows_in_fp32(checkpoint: Path, variant: str) -> None:
    groups, policy = make_groups(checkpoint), make_policy(checkpoint, **VARIANTS[variant]).to("cuda")
    (shared, shared_gradients), (dense, dense_gradients) = (scores(policy, groups, s) for s in (True, False))
    exact, gradients = exact_scores(policy, groups)
    assert (shared - exact).abs().max() <= 2 * max((dense - exact).abs().max(), torch.tensor(1e-5))
    assert gradient_error(shared_gradients, gradients) <= 2 * max(gradient_error(dense_gradients, gradients), 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_is_at_most_twice_as_far_from_fp32_as_dense_rows_are(checkpoint: Path, variant: str) -> None:
    groups = make_groups(checkpoint)
    exact, gradients = scores(make_policy(checkpoint, **VARIANTS[variant]).to("cuda"), groups, shared=False)
    policy = make_policy(checkpoint, dtype="bfloat16", **VARIANTS[variant]).to("cuda")
    (shared, shared_gradients), (dense, dense_gradients) = (scores(policy, groups, s) for s in (True, False))
    assert (shared - exact).abs().mean() <= 2 * (dense - exact).abs().mean()
    assert distance(shared_gradients, gradients) <= 2 * distance(dense_gradients, gradients)


def test_the_head_in_chunks_is_the_head_at_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, policy = make_groups(checkpoint), make_policy(checkpoint).to("cuda")
    at_once, gradients_at_once = scores(policy, groups, shared=True)
    monkeypatch.setattr("rl_vlm.model.head.HEAD_CHUNK_ELEMENTS", 1)  # a token at a time
    in_chunks, gradients_in_chunks = scores(policy, groups, shared=True)
    assert (in_chunks - at_once).abs().max() <= 1e-5
    _, gradients = exact_scores(policy, groups)
    error = gradient_error(gradients_at_once, gradients)
    assert gradient_error(gradients_in_chunks, gradients) <= 2 * max(error, 1e-5)


def test_short_rows_are_computed_as_well(checkpoint: Path) -> None:
    """With two query heads per key head, 65 tokens are more than 128 rows of FlexAttention's kernel for decoding."""
    policy = make_policy(checkpoint).to("cuda")
    groups = [make_group(make_prompt(checkpoint, [noise_image(16, 16, seed=1)]), [20, 24])]
    assert 64 < len(groups[0].group.prompt.token_ids) + 44 < 128
    forget_compiled()
    logprobs, _ = scores(policy, groups, shared=True)
    expected, _ = scores(policy, groups, shared=False)
    assert (logprobs - expected).abs().max() <= 1e-4


def test_two_calls_of_sdpa_compute_the_same(checkpoint: Path) -> None:
    groups, policy = make_groups(checkpoint), make_policy(checkpoint).to("cuda")
    expected, gradients = scores(policy, groups, shared=True)
    enable_shared_rows(policy.transformer, "sdpa")
    found, its_gradients = scores(policy, groups, shared=True)
    assert (found - expected).abs().max() <= 1e-4
    assert gradient_error(its_gradients, gradients) <= 1e-4


def test_flash_attention_is_at_most_twice_as_far_from_fp32_as_flex_attention(checkpoint: Path) -> None:
    """Layers that are not causal take FlexAttention with both settings."""
    groups = make_groups(checkpoint)
    exact, gradients = scores(make_policy(checkpoint).to("cuda"), groups, shared=True)
    policy = make_policy(checkpoint, dtype="bfloat16").to("cuda")
    found = []
    for setting in ("flash", "flex"):
        enable_shared_rows(policy.transformer, setting)
        found.append(scores(policy, groups, shared=True))
    (flash, flash_gradients), (flex, flex_gradients) = found
    assert (flash - exact).abs().mean() <= 2 * (flex - exact).abs().mean()
    assert distance(flash_gradients, gradients) <= 2 * distance(flex_gradients, gradients)


@pytest.mark.parametrize("completions", [[[800] * 8], [[200, 1, 7], [90, 513]], [[1], []]])
def test_the_kernels_of_flash_attention_are_those_of_flex_attention(completions: list[list[int]]) -> None:
    layout = RowLayout.build([300, 40][: len(completions)], completions, "cuda")
    torch.manual_seed(0)
    tokens = len(layout.output_index)
    query, key, value = (
        torch.randn(heads, tokens, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (16, 2, 2)
    )
    weights, found = torch.randn(tokens, 16, 128, device="cuda"), []
    rule: Any = causal_mask_function
    for setting in ("flash", "flex"):
        output = shared_attention(query, key, value, layout.with_masks(rule, setting), 128**-0.5)
        found.append([output, *torch.autograd.grad((output * weights).sum(), (query, key, value))])
    assert all((a - b).norm() <= 1e-2 * b.norm() for a, b in zip(*found, strict=True))


def test_fused_layers_compute_the_same(checkpoint: Path) -> None:
    """In bfloat16 they are at most twice as far from float32 as layers that are not fused."""
    groups = make_groups(checkpoint)
    exact, gradients = scores(make_policy(checkpoint).to("cuda"), groups, shared=True)
    policy = make_policy(checkpoint, dtype="bfloat16").to("cuda")
    plain, plain_gradients = scores(policy, groups, shared=True)
    compile_layers(policy)
    fused, fused_gradients = scores(policy, groups, shared=True)
    assert (fused - exact).abs().mean() <= 2 * (plain - exact).abs().mean()
    assert distance(fused_gradients, gradients) <= 2 * distance(plain_gradients, gradients)


def test_a_new_length_does_not_compile_again(checkpoint: Path) -> None:
    forget_compiled()
    policy = make_policy(checkpoint).to("cuda")
    for lengths in ([5, 3], [40, 33], [120, 7, 64]):
        policy(
            Forward(whole([make_group(make_prompt(checkpoint, [noise_image(32, 24, seed=1)]), lengths)], shared=True))
        )
    compiled = torch._dynamo.utils.counters["frames"]["total"]
    policy(
        Forward(whole([make_group(make_prompt(checkpoint, [noise_image(48, 24, seed=1)]), [77, 55, 9])], shared=True))
    )
    assert torch._dynamo.utils.counters["frames"]["total"] == compiled
