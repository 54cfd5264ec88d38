"""Tiny models of a given resolution: how many tokens an image has, and which families have one resolution only."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rl_vlm.errors import ConfigError
from rl_vlm.tiny.family import Resolution
from tests.helpers.builders import make_prompt, noise_image
from tests.helpers.stock import model_inputs
from tests.tiny.build import ALL_FAMILIES, build_tiny

RESIZABLE = [
    "gemma3",
    "internvl",
    "llava",
    "paligemma",
    "paligemma2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
]


def test_the_families_with_any_resolution():
    assert sorted(name for name, family in ALL_FAMILIES.items() if family.is_resizable) == RESIZABLE


def test_pixels_are_normalized_with_these_values(tmp_path: Path):
    build_tiny("qwen3_vl", tmp_path, hidden_size=48, pixels=(0.25, 0.5))
    white = Image.new("RGB", (32, 32), "white")
    assert make_prompt(tmp_path, [white]).mm_inputs["pixel_values"].unique().tolist() == [(1 - 0.25) / 0.5]


@pytest.mark.parametrize("family", RESIZABLE)
@pytest.mark.parametrize(("tokens_per_side", "num_tokens"), [(1, 1), (2, 4)])
def test_an_image_of_any_size_has_these_tokens(family: str, tokens_per_side: int, num_tokens: int, tmp_path: Path):
    build_tiny(family, tmp_path, hidden_size=48, resolution=Resolution(32, tokens_per_side))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    for side in (16, 64):
        prompt = make_prompt(tmp_path, [noise_image(side, side, seed=0)])
        assert int((prompt.token_ids == model.config.image_token_id).sum()) == num_tokens
    with torch.no_grad():
        assert model(**model_inputs(prompt)).logits.isfinite().all()


def test_a_family_with_one_resolution_is_refused_with_those_that_have_any(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"the tiny ovis2 has one resolution only; these have any: qwen2_vl, "):
        build_tiny("ovis2", tmp_path, resolution=Resolution(32, 2))
