"""One call of a projector for all images has the output of the model's own code, which calls it once per image."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rl_vlm.model.families import FAMILIES
from rl_vlm.model.projection import column_of_blocks
from tests.helpers.builders import make_policy, make_prompt, noise_image, sharp_checkpoint

PROJECTORS = {"lfm2_vl": "multi_modal_projector", "minicpmv4_6": "merger", "paddleocr_vl": "projector"}
IMAGES = [noise_image(64, 32, seed=1), noise_image(32, 48, seed=2), noise_image(32, 32, seed=3)]


@pytest.mark.parametrize("family", PROJECTORS)
def test_features_are_those_of_the_models_own_code(family: str, tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint(family, tmp_path / "model")
    model: Any = make_policy(checkpoint).transformer.base_model.double()
    inputs = dict(make_prompt(checkpoint, IMAGES).mm_inputs)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    compute, projector = FAMILIES[family].image_features, getattr(model, PROJECTORS[family])
    assert compute is not None
    with (
        torch.no_grad(),
        mock.patch.object(type(projector), "forward", autospec=True, side_effect=type(projector).forward) as calls,
    ):
        found = compute(model, **inputs)
        assert calls.call_count == 1
        expected = model.get_image_features(**inputs, return_dict=True)
    assert len(found.pooler_output) == len(expected.pooler_output) >= 3
    assert len({len(each) for each in found.pooler_output}) > 1
    for one, other in zip(found.pooler_output, expected.pooler_output, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["4x", "16x"])
def test_minicpm_merges_as_often_as_its_config_says(mode: str, tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint("minicpmv4_6", tmp_path / "model")
    model: Any = make_policy(checkpoint).transformer.base_model.double()
    model.config.downsample_mode = mode
    if mode == "4x":  # twice as many patches on each side are left to merge
        merger = model.merger
        first = type(merger.mlp[0])(model.config.vision_config.hidden_size, model.config.vision_config.hidden_size)
        merger.mlp.insert(0, first.double())
        merger.merger_times = 2
    inputs = dict(make_prompt(checkpoint, IMAGES).mm_inputs)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    compute = FAMILIES["minicpmv4_6"].image_features
    assert compute is not None
    with torch.no_grad():
        found, expected = compute(model, **inputs), model.get_image_features(**inputs, return_dict=True)
    for one, other in zip(found.pooler_output, expected.pooler_output, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_blocks_of_all_images_stand_in_one_column() -> None:
    """Two images of 2 x 4 and 2 x 2 patches, in blocks of 2 x 2."""
    images = [torch.arange(8.0)[:, None], torch.arange(10.0, 14.0)[:, None]]
    column = column_of_blocks(images, [(2, 4), (2, 2)], (2, 2))
    assert column[..., 0].tolist() == [[0, 1], [4, 5], [2, 3], [6, 7], [10, 11], [12, 13]]
