"""Gradient checkpointing of one part: which layers run again, that results do not change, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_vlm.errors import ConfigError
from tests.helpers.builders import gradient_error, make_policy, sharp_checkpoint
from tests.helpers.family_parity import case_groups, scores
from tests.tiny.build import TINY_FAMILIES


@pytest.fixture(scope="module", params=["qwen2_5_vl", "internvl"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def forwards(policy: Any, groups: Any) -> tuple[Any, dict[str, set[int]]]:
    """Scores of the groups, and how often layers of each part ran for them."""
    counts: dict[Any, int] = {}

    def count(module: Any, *_: Any) -> None:
        counts[module] = counts.get(module, 0) + 1

    layers = {n: m for n, m in policy.transformer.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    hooks = [layer.register_forward_pre_hook(count) for layer in layers.values()]
    found = scores(policy, groups, shared=True)
    for hook in hooks:
        hook.remove()
    parts: dict[str, set[int]] = {"vision": set(), "language": set()}
    for name, layer in layers.items():
        parts["vision" if f"{name}.".startswith(policy.family.vision_prefixes) else "language"].add(counts[layer])
    return found, parts


@pytest.mark.parametrize(
    ("part", "vision", "language"),
    [(False, 1, 1), (True, 2, 2), ("vision_tower", 2, 1), ("language_model", 1, 2)],
    ids=str,
)
def test_only_the_layers_of_the_part_run_again(
    family: str, checkpoint: Path, part: bool | str, vision: int, language: int
) -> None:
    groups = case_groups(checkpoint, "several prompts")
    plain = scores(make_policy(checkpoint), groups, shared=True)
    policy = make_policy(checkpoint, part)
    found, counts = forwards(policy, groups)
    assert counts == {"vision": {vision}, "language": {language}}
    assert policy.counters["vision_recomputations"] == (vision - 1)
    assert torch.equal(found.logprobs, plain.logprobs)
    assert gradient_error(found.gradients, plain.gradients) <= 1e-6


@pytest.mark.parametrize("offloads", [False, True])
def test_the_last_layer_is_kept_if_the_head_is_frozen(checkpoint: Path, offloads: bool) -> None:
    groups = case_groups(checkpoint, "several prompts")
    lora: dict[str, Any] = {"use_peft": True, "lora_r": 4}
    plain = scores(make_policy(checkpoint, **lora), groups, shared=True)
    policy = make_policy(checkpoint, True, activation_offloading=offloads, **lora)
    found, counts = forwards(policy, groups)
    assert counts["language"] == ({2} if offloads else {1, 2})
    decoder: Any = policy.transformer.get_decoder()
    assert decoder.layers[-1].gradient_checkpointing == offloads
    assert torch.equal(found.logprobs, plain.logprobs)
    assert gradient_error(found.gradients, plain.gradients) <= 1e-6


@pytest.mark.parametrize("settings", [{"use_peft": True}, {"trainable_modules": ["lm_head", "projector"]}], ids=str)
def test_a_tower_that_is_not_trained_has_nothing_to_recompute(settings: dict[str, Any], tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no weight of the vision tower is trained"):
        make_policy(tiny_checkpoint, "vision_tower", **settings)
    make_policy(tiny_checkpoint, "language_model", **settings)


@pytest.mark.parametrize("model_type", sorted({"perception_lm", "mllama"} & TINY_FAMILIES.keys()))
def test_a_tower_without_layers_that_can_be_recomputed_is_refused(model_type: str, tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint(model_type, tmp_path)
    message = f"no effect: .* in transformers' {model_type} .*; set language_model, or leave it out"
    with pytest.raises(ConfigError, match=message):
        make_policy(checkpoint, "vision_tower")
    make_policy(checkpoint, "language_model")
    assert not make_policy(checkpoint, True).vision.is_recomputed
