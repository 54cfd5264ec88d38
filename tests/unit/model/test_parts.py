"""Which modules get an adapter if `lora_target_modules` names parts, by literal lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.errors import ConfigError
from rl_vlm.model.loading import load_model
from rl_vlm.model.lora import adapter_layers, adapts_tied_weight
from tests.helpers.builders import make_policy
from tests.helpers.tiny_run import make_config
from tests.tiny.build import build_tiny

DECODER = [
    f"layers.{i}.{name}"
    for i in (0, 1)
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )
]  # fmt: skip
PARTS: dict[str, dict[str, list[str]]] = {
    "qwen2_5_vl": {
        "lm_head": ["lm_head"],
        "language_model": [f"model.language_model.{name}" for name in DECODER],
        "projector": ["model.visual.merger.mlp.0", "model.visual.merger.mlp.2"],
        "vision_tower": [
            f"model.visual.blocks.{i}.{name}"
            for i in (0, 1)
            for name in ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        ],
    },
    "internvl": {
        "lm_head": ["lm_head"],
        "language_model": [f"model.language_model.{name}" for name in DECODER],
        "projector": ["model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2"],
        "vision_tower": [
            f"model.vision_tower.encoder.layer.0.{name}"
            for name in (
                "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.projection_layer",
                "mlp.fc1", "mlp.fc2",
            )
        ],
    },
    "idefics3": {
        "lm_head": ["lm_head"],
        "language_model": [f"model.text_model.{name}" for name in DECODER],
        "projector": ["model.connector.modality_projection.proj"],
        "vision_tower": [
            f"model.vision_model.encoder.layers.0.{name}"
            for name in (
                "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"
            )
        ],
    },
    "gemma3": {
        "lm_head": ["lm_head"],
        "language_model": [f"model.language_model.{name}" for name in DECODER],
        "vision_tower": [
            f"model.vision_tower.encoder.layers.0.{name}"
            for name in (
                "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"
            )
        ],
    },
}  # fmt: skip


def adapted(checkpoint: Path, modules: list[str] | str, **settings: Any) -> list[str]:
    policy = make_policy(checkpoint, use_peft=True, lora_r=2, lora_target_modules=modules, **settings)
    return sorted(adapter_layers(policy.transformer))


@pytest.mark.parametrize("family", PARTS)
def test_each_part_is_its_linear_layers(family: str, tmp_path: Path) -> None:
    checkpoint = build_tiny(family, tmp_path)
    for part, layers in PARTS[family].items():
        assert adapted(checkpoint, part) == adapted(checkpoint, [part]) == sorted(layers)
    every = list(PARTS[family])
    assert adapted(checkpoint, every) == sorted(name for layers in PARTS[family].values() for name in layers)


def test_a_second_tower_is_no_projector_and_unused_parts_are_neither(tmp_path: Path) -> None:
    hybrid = build_tiny("deepseek_vl_hybrid", tmp_path / "hybrid")
    assert adapted(hybrid, "projector") == [
        f"model.aligner.{name}" for name in ("high_res_vision_proj", "proj", "vision_proj")
    ]
    towers = {name.split(".")[1] for name in adapted(hybrid, "vision_tower")}
    assert towers == {"vision_model", "high_res_vision_model"}
    janus = build_tiny("janus", tmp_path / "janus")
    parts = {name.split(".")[1] for name in adapted(janus, ["projector", "vision_tower"])}
    assert parts == {"aligner", "vision_model"}


def test_parts_and_module_names_go_together_and_nothing_is_left_out_of_them(tmp_path: Path) -> None:
    checkpoint, parts = build_tiny("internvl", tmp_path), PARTS["internvl"]
    queries = [f"model.language_model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    in_tower = "model.vision_tower.encoder.layer.0.attention.q_proj"
    assert adapted(checkpoint, ["q_proj"]) == queries
    assert adapted(checkpoint, ["lm_head", "q_proj"]) == ["lm_head", *queries, in_tower]
    assert adapted(checkpoint, ["projector", "layers.1.mlp.up_proj"]) == [
        "model.language_model.layers.1.mlp.up_proj", *parts["projector"],
    ]  # fmt: skip
    kept = [name for name in parts["vision_tower"] if "mlp" not in name]
    assert adapted(checkpoint, "vision_tower", lora_exclude_modules=["fc1", "fc2"]) == sorted(kept)


def test_a_part_without_linear_layers_is_refused(tmp_path: Path) -> None:
    checkpoint = build_tiny("gemma3", tmp_path)
    for modules in ("projector", ["language_model", "projector"]):
        with pytest.raises(ConfigError, match=r"lora_target_modules: the projector of gemma3 has no linear layers"):
            adapted(checkpoint, modules)


def test_a_misspelt_part_is_named(tmp_path: Path) -> None:
    checkpoint = build_tiny("qwen2_5_vl", tmp_path)
    with pytest.raises(ConfigError, match=r"no module 'vision_towers' \(did you mean 'vision_tower'\?\)"):
        adapted(checkpoint, ["vision_towers"])


def test_a_checkpoint_keeps_the_modules_of_its_parts(tmp_path: Path) -> None:
    """`peft` alone finds the same modules, and other parts are refused."""
    checkpoint, settings = build_tiny("internvl", tmp_path / "base"), {"use_peft": True, "lora_r": 2}
    parts = ["projector", "vision_tower", "language_model"]
    make_policy(checkpoint, **settings, lora_target_modules=parts).model.save_pretrained(tmp_path / "adapter")

    def loaded(modules: list[str] | str, **others: Any) -> Any:
        model = make_config(checkpoint, tmp_path, **settings, lora_target_modules=modules, **others).model
        return load_model(str(checkpoint), tmp_path / "adapter", model)

    assert len(adapter_layers(loaded(parts).get_base_model())) == 14 + 2 + 6
    with pytest.raises(ConfigError, match=r"is on other modules \(1, such as lm_head\): name its modules"):
        loaded([*parts, "lm_head"])
    with pytest.raises(ConfigError, match=r"is on other modules \(2, such as model.multi_modal_projector.linear_1\)"):
        loaded(parts[1:])
    with pytest.raises(ConfigError, match=r"lora_r is 4, but the adapter .* has 2"):
        load_model(
            str(checkpoint), tmp_path / "adapter",
            make_config(checkpoint, tmp_path, use_peft=True, lora_r=4, lora_target_modules=parts).model,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "modules", "expected"),
    [
        ("qwen2_5_vl", "lm_head", False),
        ("internvl", "lm_head", True),
        ("internvl", ["embed_tokens"], True),
        ("internvl", "language_model", False),
    ],
)
def test_adapters_on_one_use_of_a_tied_weight(
    family: str, modules: list[str] | str, expected: bool, tmp_path: Path
) -> None:
    policy = make_policy(build_tiny(family, tmp_path), use_peft=True, lora_r=2, lora_target_modules=modules)
    assert adapts_tied_weight(policy.transformer) == expected


def test_an_adapter_on_a_tied_head_leaves_the_embeddings_as_they_are(tmp_path: Path) -> None:
    policy = make_policy(build_tiny("internvl", tmp_path), use_peft=True, lora_r=2, lora_target_modules="lm_head")
    head: Any = policy.transformer.get_output_embeddings()
    embeddings: Any = policy.transformer.get_input_embeddings()
    weight = embeddings.weight.detach()
    assert torch.equal(embeddings(torch.tensor([5])), weight[5:6])
    hidden = torch.ones(1, weight.shape[1])
    update = head.lora_B["default"].weight @ head.lora_A["default"].weight * (32 / 2)
    assert torch.allclose(head(hidden), hidden @ (weight + update).T, atol=1e-5)
    assert not torch.allclose(head(hidden), hidden @ weight.T, atol=1e-2)
