"""Planned prompts, against those that each family's processor makes of a real image."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError
from rl_vlm.model.families import FAMILIES
from rl_vlm.plan.build import ASSUMED_FRAME_PIXELS, ASSUMED_PIXELS, planned_format, prompt_size
from rl_vlm.plan.tracing.groups import MERGED, RESIZED, TILED, PromptSize, make_group, make_prompt
from rl_vlm.types import VideoFormat
from tests.helpers import builders
from tests.helpers.videos import noise_video, video_prompt
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


OFTEN = {"qwen2_5_vl", "qwen3_vl", "internvl"}
WITH_VIDEOS = [
    pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow)
    for name in KNOWN
    if FAMILIES[name].videos is not None
]


@pytest.mark.ci
@pytest.mark.parametrize("video_format", ["native", "frames"])
@pytest.mark.parametrize("family", WITH_VIDEOS)
def test_prompts_with_a_video_have_the_shapes_of_the_processor(family: str, video_format: VideoFormat, tmp_path: Path):
    checkpoint = build_tiny(family, tmp_path)
    config = AutoConfig.from_pretrained(checkpoint)
    real = video_prompt(checkpoint, [noise_video(6, seed=0, size=(16, 16))], video_format=video_format)
    planned = make_prompt(config, PromptSize(16**2, 10, num_frames=6, video_format=video_format))
    assert planned.num_images == real.num_images
    row = FAMILIES[family]
    counts = [row.is_video(config, prompt).tolist() for prompt in (planned, real)]
    assert counts[0] == counts[1]
    assert planned.token_inputs.keys() == real.token_inputs.keys()
    shapes = [{name: t.shape for name, t in prompt.mm_inputs.items()} for prompt in (planned, real)]
    assert shapes[0] == shapes[1]
    for name in {"image_grid_thw", "video_grid_thw"} & real.mm_inputs.keys():
        assert planned.mm_inputs[name].tolist() == real.mm_inputs[name].tolist()


def test_the_plan_has_a_video_if_the_data_has_one(tmp_path: Path):
    config = AutoConfig.from_pretrained(build_tiny("qwen2_5_vl", tmp_path / "model"))

    def size(**data: Any) -> PromptSize:
        given = {"model": {"model_name_or_path": "any"}, "data": {"dataset_name": "org/data"} | data}
        return prompt_size(RunConfig.model_validate(given), config)

    assert size() == PromptSize(ASSUMED_PIXELS, 256)
    assert size(num_frames=8, video_max_pixels=1024) == PromptSize(1024, 256, 8)
    assert size(columns={"video": "clip"}) == PromptSize(ASSUMED_FRAME_PIXELS, 256, 64)
    assert size(max_frames=16) == PromptSize(ASSUMED_FRAME_PIXELS, 256, 16)
    assert size(fps=1.0, max_frames=16, video_total_pixels=32_000).image_pixels == 2000
    # four pairs of frames of 8 x 8 patches, of which four are a token
    assert size(num_frames=8, video_max_pixels=1024, max_prompt_length=100) == PromptSize(1024, 36, 8)
    with pytest.raises(ConfigError, match=r"no room for text beside 8 frames of 1,024 pixels, with 64 tokens: lower "):
        size(num_frames=8, video_max_pixels=1024, max_prompt_length=64)
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "?", "video": "a.mp4"}\n')
    assert size(dataset_name=str(file)).num_frames == 64
    file.write_text('{"prompt": "?", "image": "a.png"}\n')
    assert size(dataset_name=str(file)).num_frames == 0


def test_videos_that_only_environments_show_are_frames_for_an_engine_with_its_own_weights(tmp_path: Path):
    checkpoint = str(build_tiny("qwen2_5_vl", tmp_path / "model"))

    def form(engine: str, **data: Any) -> VideoFormat:
        given = {
            "model": {"model_name_or_path": checkpoint}, "data": {"dataset_name": "org/data", "max_frames": 8} | data,
            "rollout": {"engine": engine, "environment": "films.py:Films"},
        }  # fmt: skip
        return planned_format(RunConfig.model_validate(given), checkpoint)

    assert [form("hf"), form("vllm")] == ["native", "native"]  # of rows
    assert [form("hf", text_only=True), form("vllm", text_only=True)] == ["native", "frames"]
    drawn = {"dataset_name": "draws:100"}
    assert [form("hf", **drawn), form("vllm", **drawn)] == ["native", "frames"]
    assert form("hf", **drawn, video_format="frames") == "frames"


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
