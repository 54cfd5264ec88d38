"""Training by part: which weights each part is, and that they get the gradients of the model's own forward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from rl_vlm.errors import ConfigError
from rl_vlm.grpo_trainer import GRPOTrainer
from rl_vlm.run.run import train
from tests.helpers.builders import make_policy, sharp_checkpoint
from tests.helpers.family_parity import Parity, case_groups, scores, stock_scores
from tests.helpers.resuming import assert_same_run, config_of, resumed, train_until
from tests.helpers.tiny_run import DEFAULTS, model_weights, rows, token_sum
from tests.tiny.build import build_tiny

PARTS = {
    "qwen2_5_vl": {
        "lm_head": r"lm_head\.weight",
        "language_model": r"lm_head\.weight|model\.language_model\..*",
        "projector": r"model\.visual\.merger\..*",
        "vision_tower": r"model\.visual\.(blocks|patch_embed)\..*",
    },
    "internvl": {
        "language_model": r"model\.language_model\..*",
        "projector": r"model\.multi_modal_projector\..*",
        "vision_tower": r"model\.vision_tower\..*",
    },
    "gemma3": {
        "language_model": r"model\.language_model\..*",
        "projector": r"model\.multi_modal_projector\..*",
        "vision_tower": r"model\.vision_tower\..*",
    },
}
"""Names of the weights of each part. The LM heads of the last two are tied to the embeddings."""


@pytest.fixture(scope="module", params=PARTS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def trained(policy: nn.Module) -> set[str]:
    return {name.removeprefix("model.") for name, p in policy.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_part_gets_the_gradients_of_the_models_own_forward(
    family: str, checkpoint: Path, checkpointing: bool
) -> None:
    groups = case_groups(checkpoint, "several prompts")
    for part, pattern in PARTS[family].items():
        policy = make_policy(checkpoint, checkpointing, trainable_modules=part)
        names = [name for name, _ in policy.transformer.named_parameters()]
        assert trained(policy) == {name for name in names if re.fullmatch(pattern, name)}
        expected = stock_scores(policy, groups)
        for shared in (False, True):
            found = scores(policy, groups, shared)
            assert {name.removeprefix("model.") for name in found.gradients} <= trained(policy)
            assert Parity.of(found, expected).worst <= 1e-5
        assert expected.gradients


def test_adapters_of_parts_get_the_gradients_of_the_models_own_forward(family: str, checkpoint: Path) -> None:
    groups, parts = case_groups(checkpoint, "several prompts"), [*PARTS[family]]
    parts = [part for part in parts if (family, part) != ("gemma3", "projector")]  # it has no linear layer
    policy = make_policy(checkpoint, use_peft=True, lora_r=4, lora_target_modules=[*parts, "lm_head"])
    expected = stock_scores(policy, groups)
    assert {name.removeprefix("model.") for name in expected.gradients} == trained(policy)
    for shared in (False, True):
        assert Parity.of(scores(policy, groups, shared), expected).worst <= 1e-5


def test_a_tower_that_is_not_trained_runs_once_and_without_gradients(family: str, checkpoint: Path) -> None:
    groups = case_groups(checkpoint, "one image")
    for part in ("language_model", "projector"):
        policy = make_policy(checkpoint, True, trainable_modules=[part])
        scores(policy, groups, shared=True)
        scores(policy, groups, shared=True)
        assert policy.counters["vision_forwards"] == (1 if part == "language_model" else 2)
        assert policy.counters["vision_recomputations"] == 0
        assert not any(
            p.requires_grad for name, p in policy.named_parameters() if "encoder" in name or "blocks" in name
        )


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (["lm_head", "projector"], r"lm_head\.weight|model\.visual\.merger\..*"),
        (["layers.1.mlp"], r"model\.language_model\.layers\.1\.mlp\..*"),
        (r".*layers\.0\.self_attn\.[qk]_proj", r"model\.language_model\.layers\.0\.self_attn\.[qk]_proj\..*"),
        (["patch_embed"], r"model\.visual\.patch_embed\..*"),
    ],
    ids=str,
)
def test_names_and_regular_expressions(wanted: list[str] | str, expected: str, tiny_checkpoint: Path) -> None:
    policy = make_policy(tiny_checkpoint, trainable_modules=wanted)
    names = [name for name, _ in policy.transformer.named_parameters()]
    assert trained(policy) == {name for name in names if re.fullmatch(expected, name)}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["projecter"], r"the model has no module 'projecter' \(did you mean 'projector'\?\)"),
        (["lm_heads"], r"did you mean 'lm_head'\?"),
        (".*no_such", "matches none of the model's modules"),
        ("(", "is not a regular expression"),
        (["act_fn"], "selects modules that have no weights"),
    ],
)
def test_names_that_select_nothing_are_refused(wanted: list[str] | str, message: str, tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(tiny_checkpoint, trainable_modules=wanted)


def test_half_of_a_tied_weight_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = build_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))
    for half, other in (("lm_head", "embed_tokens"), ("embed_tokens", "lm_head")):
        with pytest.raises(ConfigError, match=f"they are one weight: add '{other}' to train both, or select neither"):
            make_policy(checkpoint, trainable_modules=[half])
    policy = make_policy(checkpoint, trainable_modules=["lm_head", "embed_tokens"])
    assert trained(policy) == {"model.language_model.embed_tokens.weight"}


def test_an_adapter_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    make_policy(tiny_checkpoint, use_peft=True, lora_r=2).model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"trainable_modules cannot be used with the adapter"):
        make_policy(tmp_path, trainable_modules="lm_head")


def test_an_adapter_inside_a_frozen_tower_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A new one, that of a checkpoint, and one in a run from Python. One outside of the tower is trained."""
    message = r"freeze_vision_tower cannot be used with an adapter .* \(\d+ layers, such as model\.visual\."
    inside: dict[str, Any] = {"use_peft": True, "lora_r": 2, "lora_exclude_modules": []}
    with pytest.raises(ConfigError, match=message):
        make_policy(tiny_checkpoint, freeze_vision_tower=True, **inside)
    make_policy(tiny_checkpoint, **inside).model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=message):
        make_policy(tmp_path / "adapter", freeze_vision_tower=True)
    settings = {name: value for name, value in DEFAULTS.items() if name not in ("dataset_name", "reward_funcs")}
    run = GRPOTrainer(
        str(tiny_checkpoint), reward_funcs=token_sum, train_dataset=rows(), output_dir=tmp_path / "run",
        freeze_vision_tower=True, **{**settings, **inside},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        run.train()

    outside = make_policy(tiny_checkpoint, use_peft=True, lora_r=2, freeze_vision_tower=True)
    outside.model.save_pretrained(tmp_path / "outside")
    for policy in (outside, make_policy(tmp_path / "outside", freeze_vision_tower=True)):
        assert trained(policy) and not [name for name in trained(policy) if "visual" in name]


def test_a_run_changes_only_what_it_trains_and_resumes_bitwise(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"trainable_modules": ["projector", "layers.1.mlp"]}
    straight, killed = (config_of("full", tiny_checkpoint, tmp_path / name, **settings) for name in "ab")
    train(straight)
    before, after = model_weights(tiny_checkpoint), model_weights(tmp_path / "a" / "checkpoint-5")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if "visual.merger." in name or "layers.1.mlp." in name}
    train_until(4, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "b", tmp_path / "a")


def test_a_run_of_adapters_by_part_resumes_bitwise(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["lm_head", "projector", "vision_tower"]}
    straight, killed = (config_of("full", tiny_checkpoint, tmp_path / name, **settings) for name in "ab")
    train(straight)
    train_until(4, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "b", tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("with_others", "pattern"),
    [
        ("qwen2_5_omni_thinker", r"audio_tower\..*"),
        ("qwen3_omni_moe_thinker", r"audio_tower\..*"),
        ("gemma4_unified", r"model\.embed_audio\..*"),
        ("minimax_m3_vl", r"model\.language_model\.layers\.0\.self_attn\.indexer\..*"),
        ("qwen4_exp", r"model\.language_model\.layers\.1\.self_attn\.indexer\..*"),
    ],
)
def test_weights_that_can_have_no_gradient_are_frozen(with_others: str, pattern: str, tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint(with_others, tmp_path)
    for settings in ({}, {"use_peft": True, "lora_r": 2}):
        policy = make_policy(checkpoint, **settings)
        plain = {name for name, _ in policy.transformer.named_parameters() if "lora_" not in name}
        others = {name for name in plain if re.fullmatch(pattern, name)}
        assert others
        assert not any(policy.transformer.get_parameter(name).requires_grad for name in others)
        if not settings:
            assert trained(policy) == plain - others
        found = scores(policy, case_groups(checkpoint, "one image"), shared=False).gradients
        assert found.keys() == {name for name, p in policy.named_parameters() if p.requires_grad}
