"""Decoder layers that `torch.compile` fuses, here without a code generator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoTokenizer

from rl_vlm.config.schema import RunConfig
from rl_vlm.model import fused
from rl_vlm.model.fused import compile_layers, fuse_layers
from rl_vlm.model.policy import Policy
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.types import Forward, RolloutRequest, Sampling
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

COMPILED_PARTS = 4
"""Of a layer: up to its attention module, from there to the attention, from there to the module's end, and the rest."""
WITHOUT_GRADIENT = 3
"""With LoRA, the first layer's input has no gradient. All parts but the last are compiled again for it."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield


def scores(policy: Policy, checkpoint: Path, size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    group = make_group(make_prompt(checkpoint, [noise_image(size, 24, seed=size)]), [5, 1, size])
    logprobs = policy(Forward(whole([group], shared=True))).logprobs_NT
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
    return logprobs.detach(), take_gradients(policy)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "graphs"),
    [({}, COMPILED_PARTS), ({"use_peft": True, "lora_r": 4}, COMPILED_PARTS + WITHOUT_GRADIENT)],
    ids=["full", "LoRA"],
)
def test_fused_layers_compute_the_same_and_share_what_is_compiled(
    model: dict[str, Any], graphs: int, checkpoint: Path
) -> None:
    policy = make_policy(checkpoint, gradient_checkpointing=True, **model)
    expected = [scores(policy, checkpoint, size) for size in (32, 40)]
    compile_layers(policy, backend="aot_eager")
    for size, (logprobs, gradients) in zip((32, 40), expected, strict=True):
        found, its_gradients = scores(policy, checkpoint, size)
        torch.testing.assert_close(found, logprobs)
        assert gradient_error(its_gradients, gradients) <= 1e-5
    assert counters["stats"]["unique_graphs"] == graphs  # of two layers and two lengths


def test_rollouts_compile_nothing(checkpoint: Path) -> None:
    policy = make_policy(checkpoint)
    compile_layers(policy, backend="aot_eager")
    engine = HFEngine.for_policy(policy, AutoTokenizer.from_pretrained(checkpoint), max_num_seqs=2)
    engine.generate([RolloutRequest("0", make_prompt(checkpoint, []))], Sampling(2, 3, temperature=1.0, seed=0))
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize(
    ("settings", "device", "shards_weights", "fuses"),
    [
        ({}, "cuda", False, True),
        ({"model": {"fused": "off"}}, "cuda", False, False),
        ({}, "cpu", False, False),
        ({}, "cuda", True, False),
        ({"model": {"load_in_4bit": True, "use_peft": True}}, "cuda", False, False),
        ({"memory": {"activation_offloading": True}}, "cuda", False, False),
        ({"log": {"memory_profile": True}}, "cuda", False, False),
    ],
)
def test_layers_are_fused_on_a_gpu_that_holds_whole_weights(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], device: str, shards_weights: bool, fuses: bool
) -> None:
    compiled = mock.Mock()
    monkeypatch.setattr(fused, "compile_layers", compiled)
    policy = mock.Mock(spec=Policy, device=torch.device(device))
    config = RunConfig.model_validate(settings | {"model": {"model_name_or_path": "m"} | settings.get("model", {})})
    fuse_layers(policy, config, shards_weights)
    assert compiled.called == fuses


def test_more_graphs_are_allowed_than_pytorch_allows_by_itself(checkpoint: Path) -> None:
    policy = make_policy(checkpoint)
    compile_layers(policy, backend="aot_eager")
    assert torch._dynamo.config.recompile_limit == 64
