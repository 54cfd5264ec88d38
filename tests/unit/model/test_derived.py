"""Facts derived from models, against the rows of the table."""

import functools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from rl_vlm.errors import ModelError
from rl_vlm.model.derived import derived_family, empty_model, names_used, runs_without_gradient
from rl_vlm.model.families import FAMILIES, family_of
from rl_vlm.model.family import Family, positions_after_videos, rope_positions, text_positions
from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer
from tests.tiny.build import TINY_FAMILIES
from tests.tiny.rare import CONFIGS
from tests.tiny.unlisted import UNLISTED
from tests.unit.model.type_census import outcome_of_facts

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
    assert derived.num_towers == row.num_towers
    names = [name for name, _ in empty_model(config).named_parameters()]
    assert list(map(derived.has_gradient, names)) == list(map(row.has_gradient, names))
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
    ("family", "towers", "projectors", "others"),
    [
        (
            "deepseek_vl_hybrid",
            ("model.vision_model", "model.high_res_vision_model"),
            ("high_res_vision_neck", "high_res_vision_proj", "aligner", "high_res_vision_alpha"),
            (),
        ),
        ("video_llava", ("model.image_tower",), ("multi_modal_projector",), ("model.video_tower",)),
        (
            "janus",
            ("model.vision_model",),
            ("aligner",),
            ("model.vqmodel", "model.generation_embeddings", "model.generation_aligner", "model.generation_head"),
        ),
        ("glm5_next", ("model.visual",), None, ("model.language_model.layers.1.self_attn.indexer",)),
        ("gemma3n", ("model.vision_tower",), ("embed_vision",), ("model.audio_tower", "model.embed_audio")),
    ],
)
def test_parts_are_towers_projectors_or_without_a_gradient(
    family: str, towers: tuple[str, ...], projectors: tuple[str, ...] | None, others: tuple[str, ...]
) -> None:
    found = family_of(config_of(family))
    assert found.tower_modules == towers
    assert projectors is None or found.projector_modules == tuple(f"model.{name}" for name in projectors)
    assert found.other_modules == others


def test_a_projector_within_any_tower_is_one() -> None:
    family = Family("two_towers", ("model.visual", "model.other"), num_towers=2)
    assert {"model.visual.merger", "model.other.merger"} <= set(family.projector_modules)


class Parts(PreTrainedModel):
    """A model whose parts are reached in several ways."""

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())

    def get_image_features(self) -> Any:
        return [self.each(i) for i in range(2)], getattr(self, "by_text", 0), self.as_property, self.get_video_features

    @torch.no_grad()
    def each(self, i: int) -> Any:
        return self.in_a_loop

    @property
    def as_property(self) -> Any:
        return self.in_a_property

    def get_video_features(self) -> Any:
        return self.for_videos


def test_names_are_found_in_the_functions_that_a_function_calls() -> None:
    found = names_used(Parts(), "get_image_features")
    assert {"each", "in_a_loop", "by_text", "in_a_property", "get_video_features"} <= found
    assert "for_videos" not in found


def test_a_decorator_disables_gradients_also_below_another() -> None:
    @functools.wraps(Parts.each)
    def outer(self: Any) -> Any:
        return Parts.each(self, 0)

    assert runs_without_gradient(Parts.each) and runs_without_gradient(outer)
    assert not runs_without_gradient(Parts.get_image_features)


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
        (lambda: AutoConfig.for_model("blip-2"), r"neither config \(image_token_id, .*\) nor processor name the token"),
        (CONFIGS["nemotron_h_omni"], "its LM head is unknown"),
        (CONFIGS["chameleon"], "its language model is not a separate module"),
        (CONFIGS["diffusion_gemma"], "it has no get_image_features"),
        (CONFIGS["evolla"], r"it cannot be created \(ValueError: Unrecognized configuration class"),
        (CONFIGS["vision-encoder-decoder"], "it is an encoder and a decoder"),
    ],
)
def test_a_model_of_another_kind_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=f"is not supported: {reason}"):
        derived_family(config())


def test_a_default_config_without_a_token_of_images_says_nothing_about_its_type() -> None:
    assert "blip-2" not in CONFIGS
    assert outcome_of_facts("blip-2") == "not tried: no default token of images"
    assert outcome_of_facts("nemotron_h_omni").startswith("refused: its LM head is unknown")
