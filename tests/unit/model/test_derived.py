"""Facts derived from models, against the rows of the table."""

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from rl_vlm.errors import ModelError
from rl_vlm.model.derived import derived_family
from rl_vlm.model.families import FAMILIES, family_of
from rl_vlm.model.family import positions_after_videos, rope_positions, text_positions
from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer
from tests.tiny.build import TINY_FAMILIES
from tests.tiny.rare import CONFIGS
from tests.tiny.unlisted import UNLISTED

OTHERWISE = {
    "mllama": "it has no get_image_features",
    "paligemma": "positions start at 1",
    "paligemma2": "positions start at 1",
    "ovis2": "its indicators are placeholders, too",
}
"""Families whose rows say more than the model does."""


def config_of(family: str) -> PreTrainedConfig:
    parts = (TINY_FAMILIES | UNLISTED)[family]
    tokenizer = train_tokenizer(DEFAULT_CORPUS, parts.special_tokens, model_specific_special_tokens=parts.token_names)
    return parts.config(tokenizer, 96)


@pytest.mark.parametrize("family", sorted(TINY_FAMILIES.keys() - OTHERWISE.keys()))
def test_derived_facts_are_those_of_the_row(family: str) -> None:
    config = config_of(family)
    row, derived = FAMILIES[config.model_type], derived_family(config)
    assert derived.vision_modules == row.vision_modules
    assert set(derived.other_modules) <= set(row.other_modules)  # Gemma 4 may come without audio
    after_videos = row.row_positions is positions_after_videos  # derived types get frames of videos as images
    assert derived.row_positions is (rope_positions if after_videos else row.row_positions)
    assert derived.pixels == row.pixels
    assert derived.banned_token_ids(config) == row.banned_token_ids(config)
    assert derived.is_derived and not row.is_derived
    assert not derived.joins_images and derived.unshardable is not None


def test_a_type_without_a_row_gets_derived_facts() -> None:
    family = family_of(config_of("lighton_ocr"))
    assert family.vision_modules == ("model.vision_encoder", "model.vision_projection")
    assert family.row_positions is text_positions
    assert family.projector_modules == ("model.vision_projection",)


@pytest.mark.parametrize(
    ("family", "pixels"),
    [
        ("lighton_ocr", ("pixel_values",)),
        ("deepseek_vl_hybrid", ("pixel_values", "high_res_pixel_values")),  # of two towers
        ("video_llava", ("pixel_values_images",)),
        ("deepseek_ocr2", ("pixel_values",)),  # its `pixel_values_local` may be missing
    ],
)
def test_pixels_are_the_arguments_that_features_need(family: str, pixels: tuple[str, ...]) -> None:
    assert family_of(config_of(family)).pixels == pixels


def test_equal_configs_have_the_facts_of_one_look() -> None:
    assert derived_family(config_of("vipllava")) is derived_family(config_of("vipllava"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: config_of("mllama"), "it has no get_image_features"),
        (lambda: AutoConfig.for_model("florence2"), "it is an encoder and a decoder"),
        (lambda: AutoConfig.for_model("bert"), r"it cannot be created \(ValueError: Unrecognized configuration class"),
        (lambda: AutoConfig.for_model("nemotron_h_omni"), "its config has no placeholder token of images"),
        (CONFIGS["chameleon"], "its language model is no module of its own"),
        (CONFIGS["diffusion_gemma"], "it has no get_image_features"),
        (CONFIGS["evolla"], r"it cannot be created \(ValueError: Unrecognized configuration class"),
        (CONFIGS["vision-encoder-decoder"], "it is an encoder and a decoder"),
    ],
)
def test_a_model_of_another_kind_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=f"is not supported: {reason}"):
        derived_family(config())
