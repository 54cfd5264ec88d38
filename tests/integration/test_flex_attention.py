"""FlexAttention in training, compiled on the CPU under the limits of a run: every family against dense rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.errors import ModelError
from rl_vlm.model.policy import Policy
from rl_vlm.types import Forward, ScoredGroup
from tests.helpers.builders import make_group, make_policy, make_prompt, noise_image, sharp_checkpoint, whole
from tests.helpers.family_parity import (
    DENSE_ALONE,
    FP32_ROUNDING,
    IMAGE_TURNS,
    NEED_AN_IMAGE,
    Parity,
    case_groups,
    cases,
    scores,
)
from tests.helpers.flex_on_cpu import captured_tensors_of_another_row, num_graphs, use_flex_attention
from tests.helpers.tiers import in_tiers
from tests.tiny.build import TINY_FAMILIES

CI_FAMILIES = {
    "gemma3",  # sliding windows, images that see themselves in both directions
    "qwen3_5",  # causal, beside states of linear attention
}
SMALL, LARGE = noise_image(32, 24, seed=1), noise_image(64, 48, seed=2)
ADAPTERS: dict[str, Any] = {"use_peft": True, "lora_r": 4, "freeze_vision_tower": True}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the test of families two kinds of mask in the second tier, and the others in the third."""
    if "family" in metafunc.fixturenames:
        families = sorted(TINY_FAMILIES.keys() - DENSE_ALONE)
        metafunc.parametrize("family", in_tiers(families, (), CI_FAMILIES), scope="module")


def rows_of(family: str, checkpoint: Path) -> dict[str, list[ScoredGroup]]:
    """Return packed rows of every kind that a family can have, below and above a block of 128 tokens."""

    def group(images: list[Any], lengths: list[int], text: str = "Which digit is this?") -> ScoredGroup:
        return make_group(make_prompt(checkpoint, images, text), lengths, seed=len(lengths))

    one_image = [group([LARGE], [160, 22, 1])]
    rows = {"one image": one_image, "short": [group([SMALL], [2, 1], "a")]}
    if family != "mllama":  # it has one prompt in a row
        rows["two images"] = [*one_image, group([SMALL], [5, 1, 9, 30])]
    if family not in NEED_AN_IMAGE:
        rows["short text"] = [group([], [5, 3])]
    if len(rows) == 4:
        rows["text beside an image"] = [*one_image, group([], [30, 2])]
    if IMAGE_TURNS in cases(family):
        rows["turns with images"] = case_groups(checkpoint, IMAGE_TURNS)
    return rows


def test_its_gradients_are_those_of_dense_rows(
    family: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    targets = {"kimi_k25": ["q_b_proj", "kv_b_proj"]}.get(family, ["q_proj", "v_proj"])  # latent attention
    policy = make_policy(checkpoint, **ADAPTERS, lora_target_modules=targets)
    rows = rows_of(family, checkpoint)
    dense = {name: scores(policy, groups, shared=False) for name, groups in rows.items()}
    use_flex_attention(monkeypatch)
    for name, groups in rows.items():
        without_gradients(policy, groups)
        parity = Parity.of(scores(policy, groups, shared=True), dense[name])
        assert parity.logprobs <= 1e-5
        assert parity.gradients <= FP32_ROUNDING.get(family, 1e-5)
    record_property("graphs", num_graphs())
    print(f"{family}: {num_graphs()} graphs")


def test_a_rule_with_tensors_of_another_row_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path)
    policy, rows = make_policy(checkpoint), rows_of("qwen2_5_vl", checkpoint)
    use_flex_attention(monkeypatch, captured_tensors_of_another_row)
    own, others = (
        Parity.of(*(scores(policy, rows[name], shared) for shared in (True, False)))
        for name in ("two images", "text beside an image")
    )
    assert own.logprobs <= 1e-5
    assert others.logprobs > 0.01


def test_the_limit_of_pytorch_would_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = sharp_checkpoint("gemma3", tmp_path)
    policy = make_policy(checkpoint, **ADAPTERS, lora_target_modules=["q_proj", "v_proj"])
    use_flex_attention(monkeypatch)
    monkeypatch.setattr("rl_vlm.model.compilation.GRAPHS", 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    failure = r"on a card: Hard failure due to fullgraph=True.*heads of 24 values"
    # `monkeypatch` would delete the setting of later tests
    with torch._dynamo.config.patch(recompile_limit=8), pytest.raises(ModelError, match=failure):
        for groups in rows_of("gemma3", checkpoint).values():
            without_gradients(policy, groups)
            scores(policy, groups, shared=True)


@torch.no_grad()
def without_gradients(policy: Policy, groups: list[ScoredGroup]) -> None:
    policy.eval()
    policy(Forward(whole(groups, shared=True)))
    policy.train()
