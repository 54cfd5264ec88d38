"""Depths of shallow models, and extrapolation from them, on literal values."""

import pytest
from transformers import AutoConfig

from rl_vlm.plan.packaged import MODEL_CONFIGS
from rl_vlm.plan.tracing.depth import Depth, Extrapolation, layer_period, with_depth


def packaged(name: str):
    return AutoConfig.from_pretrained(MODEL_CONFIGS / name)


def test_extrapolation_is_linear_in_both_depths():
    depths = Extrapolation(Depth(2, 3), Depth(4, 3), Depth(2, 4), whole=Depth(10, 7))
    held = {depth: 100.0 + 7 * depth.language + 5 * depth.vision for depth in (*depths.depths(), depths.whole)}
    assert depths.extrapolate(*(held[depth] for depth in depths.depths())) == held[depths.whole] == 205


def test_a_model_that_is_shallow_is_traced_as_it_is():
    whole = Depth(2, 1)
    depths = Extrapolation(whole, whole, whole, whole)
    assert depths.extrapolate(30.0, 30.0, 30.0) == 30


@pytest.mark.parametrize(
    ("name", "depths"),
    [
        # Shallow, more language layers, more vision layers, whole.
        ("qwen2.5-vl-7b-instruct", [(2, 2), (3, 2), (2, 3), (28, 32)]),
        # Features of three vision layers go to the first three language layers.
        ("qwen3-vl-8b-instruct", [(3, 3), (4, 3), (3, 4), (36, 27)]),
        # One layer in six attends to all tokens.
        ("gemma-3-4b-it", [(6, 2), (12, 2), (6, 3), (34, 27)]),
    ],
)
def test_depths_of_well_known_models(name, depths):
    found = Extrapolation.of(packaged(name))
    assert [(d.language, d.vision) for d in (*found.depths(), found.whole)] == depths


def test_shallow_configs():
    whole = packaged("gemma-3-4b-it")
    shallow = with_depth(whole, Depth(6, 2))
    text = shallow.get_text_config()
    assert (text.num_hidden_layers, shallow.vision_config.num_hidden_layers) == (6, 2)
    assert text.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert whole.get_text_config().num_hidden_layers == 34  # a copy was changed
    qwen3 = with_depth(packaged("qwen3-vl-8b-instruct"), Depth(3, 4))
    assert (qwen3.vision_config.depth, qwen3.vision_config.deepstack_visual_indexes) == (4, [0, 1, 2])
    assert with_depth(packaged("qwen2.5-vl-7b-instruct"), Depth(2, 3)).vision_config.fullatt_block_indexes == [0, 1, 2]


@pytest.mark.parametrize(
    ("types", "period"), [(None, 1), ("aaaa", 1), ("aab" * 3, 3), ("aab" * 3 + "a", 3), ("abc", 3)]
)
def test_the_period_of_layer_types(types, period):
    text = packaged("qwen2.5-vl-7b-instruct").get_text_config()
    text.layer_types = types and list(types)
    assert layer_period(text) == period
