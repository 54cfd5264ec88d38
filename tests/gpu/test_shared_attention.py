"""The group-shared row on a CUDA device, where one FlexAttention computes it, against one padded row per completion."""

from pathlib import Path

import pytest
import torch

from rl_vlm.model.policy import Policy
from rl_vlm.model.shared_prefix import compiled_flex_attention
from rl_vlm.types import ScoredGroup
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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "paligemma", "internvl"]
"""Causal rows, deepstack features, sliding windows with bidirectional images, a bidirectional prefix, 1-D positions."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def fresh_compiler_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    torch._dynamo.reset()
    compiled_flex_attention.cache_clear()


def make_groups(checkpoint: Path) -> list[ScoredGroup]:
    return [
        make_group(make_prompt(checkpoint, [noise_image(32, 24, seed=1)]), [5, 1, 9, 3]),
        make_group(make_prompt(checkpoint, [noise_image(64, 48, seed=2)]), [6, 2], seed=1),
    ]


def scores(policy: Policy, groups: list[ScoredGroup], shared: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = policy(whole(groups, shared)).logprobs_NT
    assert logprobs.is_cuda
    (logprobs * torch.linspace(-1, 1, logprobs.numel(), device="cuda").view_as(logprobs)).sum().backward()
    return logprobs.detach().cpu(), take_gradients(policy)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_shared_equals_dense_in_fp32(checkpoint: Path, gradient_checkpointing: bool) -> None:
    policy = make_policy(checkpoint, gradient_checkpointing).to("cuda")
    groups = make_groups(checkpoint)
    logprobs, gradients = scores(policy, groups, shared=True)
    expected, expected_gradients = scores(policy, groups, shared=False)
    assert (logprobs - expected).abs().max() <= 1e-4
    assert gradient_error(gradients, expected_gradients) <= 1e-4


def test_bf16_is_at_most_twice_as_far_from_fp32_as_dense_rows_are(checkpoint: Path) -> None:
    groups = make_groups(checkpoint)
    exact, _ = scores(make_policy(checkpoint).to("cuda"), groups, shared=False)
    policy = make_policy(checkpoint, dtype="bfloat16").to("cuda")
    shared_error, dense_error = ((scores(policy, groups, s)[0] - exact).abs().mean() for s in (True, False))
    assert shared_error <= 2 * dense_error


def test_a_new_length_does_not_compile_again(checkpoint: Path) -> None:
    policy = make_policy(checkpoint).to("cuda")
    for lengths in ([5, 3], [40, 33], [120, 7, 64]):
        policy(whole([make_group(make_prompt(checkpoint, [noise_image(32, 24, seed=1)]), lengths)], shared=True))
    compiled = torch._dynamo.utils.counters["frames"]["total"]
    policy(whole([make_group(make_prompt(checkpoint, [noise_image(48, 24, seed=1)]), [77, 55, 9])], shared=True))
    assert torch._dynamo.utils.counters["frames"]["total"] == compiled
