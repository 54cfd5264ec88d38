"""A trained vision tower that runs apart from the micro-batches of groups that are cut, against runs in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_vlm.model.policy import Policy
from tests.helpers.builders import LORA_EVERYWHERE, gradient_error, make_policy
from tests.helpers.cut_groups import cut, cut_gradients
from tests.helpers.family_parity import FP32_ROUNDING, case_groups, cases, scores, shares, stock_scores
from tests.helpers.tiers import FEW_FAMILIES, families_in_tiers, in_tiers
from tests.tiny.build import TINY_FAMILIES

VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA": LORA_EVERYWHERE,
    "LoRA, checkpointing": LORA_EVERYWHERE | {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module", params=families_in_tiers(TINY_FAMILIES, FEW_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return make_policy(checkpoint)


def test_gradients_are_those_of_whole_groups_and_of_the_models_own_forward(
    family: str, policy: Policy, checkpoint: Path
) -> None:
    for case in cases(family):
        groups = case_groups(checkpoint, case)
        batches = cut(policy, groups)
        with_images = [g.group.prompt for g in groups if g.group.prompt.mm_inputs]
        apart = {s.prompt for batch in batches for s in batch.subgroups if s.vision_apart}
        policy.counters.clear()
        found = cut_gradients(policy, groups, batches)
        assert apart <= set(with_images)
        assert bool(apart) == bool(with_images), case
        unlike = {prompt.digest for prompt in apart}
        kept = [{s.prompt.digest for s in b.subgroups if s.vision_apart} for b in batches]
        joint = sum(len(policy.vision.calls(b.rendered, known)) for b, known in zip(batches, kept, strict=True))
        assert policy.counters["vision_forwards"] == 2 * len(unlike) + joint
        bound = FP32_ROUNDING.get(family, 1e-5)
        assert gradient_error(found, scores(policy, groups, shares(policy)).gradients) <= bound, case
        assert gradient_error(found, stock_scores(policy, groups).gradients) <= bound, case


@pytest.mark.parametrize("variant", in_tiers(VARIANTS, fast=(), ci={"checkpointing", "LoRA, checkpointing"}))
def test_gradients_for_each_way_to_train(family: str, checkpoint: Path, variant: str) -> None:
    policy = make_policy(checkpoint, **VARIANTS[variant])
    case = "several prompts" if "several prompts" in cases(family) else "two images"
    groups = case_groups(checkpoint, case)
    found = cut_gradients(policy, groups, cut(policy, groups))
    expected = scores(policy, groups, shares(policy)).gradients
    assert any(f".{module}." in f".{name}" for name in expected for module in policy.family.vision_modules)
    assert gradient_error(found, expected) <= FP32_ROUNDING.get(family, 1e-5)
