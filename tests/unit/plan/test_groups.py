"""Planned prompts, against those that each family's processor makes of a real image."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from rl_vlm.errors import ConfigError
from rl_vlm.plan.tracing.groups import MERGED, RESIZED, TILED, PromptSize, make_group, make_prompt
from tests.helpers import builders
from tests.tiny.build import TINY_FAMILIES, build_tiny

KNOWN = sorted(TINY_FAMILIES.keys() & (MERGED | TILED | RESIZED))


@pytest.mark.ci
@pytest.mark.parametrize("side", [16, 32])
@pytest.mark.parametrize("family", KNOWN)
def test_prompts_have_the_shapes_of_the_processor(family: str, side: int, tmp_path: Path):
    checkpoint = build_tiny(family, tmp_path)
    config = AutoConfig.from_pretrained(checkpoint)
    real = builders.make_prompt(checkpoint, [builders.noise_image(side, side, seed=0)])
    num_text = int((real.token_ids != config.image_token_id).sum())
    planned = make_prompt(config, PromptSize(side**2, num_text))
    assert len(planned.token_ids) == len(real.token_ids)
    assert int((planned.token_ids == config.image_token_id).sum()) == len(real.token_ids) - num_text
    assert planned.token_inputs.keys() == real.token_inputs.keys()
    assert {name: (t.shape, t.dtype) for name, t in planned.mm_inputs.items()} == {
        name: (t.shape, t.dtype) for name, t in real.mm_inputs.items()
    }
    if "image_grid_thw" in real.mm_inputs:
        assert planned.mm_inputs["image_grid_thw"].tolist() == real.mm_inputs["image_grid_thw"].tolist()


def test_a_family_with_other_images_is_refused(tmp_path: Path):
    config = AutoConfig.from_pretrained(build_tiny("llava", tmp_path))
    with pytest.raises(ConfigError, match="and not those of llava"):
        make_prompt(config, PromptSize(1024, 10))


def test_every_completion_of_a_group_is_trained_on(tmp_path: Path):
    config = AutoConfig.from_pretrained(build_tiny("qwen2_5_vl", tmp_path))
    group = make_group(make_prompt(config, PromptSize(1024, 10)), num_completions=3, completion_tokens=7)
    assert [len(completion.token_ids) for completion in group.group.completions] == [7, 7, 7]
    assert group.has_variance
    assert group.rewards_G.tolist() == [0, 1, 2]
    assert group.valid_G.all()
    assert (group.advantages_G != 0).all()
