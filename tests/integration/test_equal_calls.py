"""Ranks that shard weights wait for each other in every module. So with equally many runs of the vision tower, all
micro-batches of a family must call the same modules in the same order, and give gradients to the same weights."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_vlm.errors import ModelError
from rl_vlm.model import head as head_module
from rl_vlm.model.policy import Policy
from rl_vlm.model.sharding import refuse_unshardable, require_input_gradients
from rl_vlm.model.vision import idle_sample
from rl_vlm.types import Forward, MicroBatch
from tests.helpers.builders import (
    LORA_EVERYWHERE,
    make_groups,
    make_policy,
    make_prompt,
    noise_image,
    take_gradients,
    whole,
)
from tests.helpers.family_parity import NEED_AN_IMAGE, shares
from tests.helpers.tiers import FEW_FAMILIES, families_in_tiers
from tests.tiny.build import TINY_FAMILIES

UNSHARDABLE = {
    "mllama",
    "hunyuan_vl",
    "ernie4_5_vl_moe",
    "step3p7",
    "llama4",
    "qwen4_exp",
}
VISION_RUNS = 4
WAYS_TO_TRAIN: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": LORA_EVERYWHERE,
}

IMAGE = [noise_image(32, 24, seed=1)]
OTHER = [noise_image(64, 48, seed=2)]
THREE = [noise_image(32, 32, seed=seed) for seed in range(3)]
SHAPES: dict[str, list[tuple[list[Image.Image], list[int]]]] = {
    "an image": [(IMAGE, [5, 1, 9, 3])],
    "three images": [(THREE, [5, 1])],
    "two prompts": [(IMAGE, [4, 4, 2]), (OTHER, [3])],
    "one completion": [(OTHER, [7])],
    "no image": [([], [5, 1, 9, 3])],
    "with and without images": [(IMAGE, [4]), ([], [2, 2])],
}
"""Images and completion lengths of the groups of each micro-batch."""


@pytest.fixture(scope="module", params=families_in_tiers(TINY_FAMILIES, FEW_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=WAYS_TO_TRAIN)
def policy(checkpoint: Path, request: pytest.FixtureRequest) -> Policy:
    policy = make_policy(checkpoint, **WAYS_TO_TRAIN[request.param])
    require_input_gradients(policy)
    policy.vision.idle_prompt = make_prompt(checkpoint, idle_sample().images, ".")
    return policy


def batches(family: str, policy: Policy, checkpoint: Path) -> dict[str, MicroBatch]:
    """Every micro-batch of SHAPES that the family can have, with and without shared prompts."""
    found = {}
    for name, shapes in SHAPES.items():
        if family in NEED_AN_IMAGE and not all(images for images, _ in shapes):
            continue
        if policy.family.cross_attends and len(shapes) > 1:
            continue
        groups = make_groups(checkpoint, shapes)
        found[f"{name}, dense"] = whole(groups, shared=False)
        if shares(policy):
            found[f"{name}, shared"] = whole(groups, shared=True)
    return found


def calls(policy: Policy, batch: MicroBatch) -> tuple[list[tuple[str, bool]], list[str]]:
    """Return the modules with weights, as they are called, and the names of the weights that have a gradient.

    Each module's name comes with whether an input needs a gradient.
    """
    called: list[tuple[str, bool]] = []
    owners = [(name, module) for name, module in policy.named_modules() if module._parameters]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: called.append((name, any(tensor.requires_grad for tensor in inputs)))
        )
        for name, module in owners
    ]
    policy(Forward(batch, within=VISION_RUNS)).logprobs_NT.sum().backward()
    for hook in hooks:
        hook.remove()
    return called, sorted(take_gradients(policy))


def test_all_micro_batches_call_the_same_modules(
    family: str, policy: Policy, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = batches(family, policy, checkpoint)
    found = {name: calls(policy, batch) for name, batch in made.items()}
    if family in UNSHARDABLE:
        hidden = family == "llama4" and hasattr(policy.model, "peft_config")  # an adapter reads weights, and calls none
        assert any(found[name][0] != found["an image, dense"][0] for name in found) != hidden
        with pytest.raises(ModelError, match=rf"^{policy.family.model_type} .* zero3"):
            refuse_unshardable(policy, "zero3")
        return
    refuse_unshardable(policy, "zero3")
    for name, (called, gradients) in found.items():
        assert called == found["an image, dense"][0], name
        assert gradients == found["an image, dense"][1], name
    assert policy.counters["vision_forwards"] == VISION_RUNS * len(found)

    monkeypatch.setattr(head_module, "HEAD_CHUNK_ELEMENTS", 1)  # one token at once
    assert calls(policy, made["one completion, dense"]) == found["an image, dense"]
