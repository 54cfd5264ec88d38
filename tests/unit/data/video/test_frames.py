"""Which frames of a video are taken, and in which size, for the video processors of the families."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.video_utils import VideoMetadata

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.data.video.sizes import smallest_frame
from rl_vlm.data.video.timeline import constant, timeline
from rl_vlm.errors import ConfigError

TEN_SECONDS = constant(300, 30.0)


def rule(name: str | None, **settings: Any) -> FrameRule:
    processor = None if name is None else getattr(transformers, f"{name}VideoProcessor")()
    return FrameRule(DataConfig(**settings), processor)


def chosen(found: FrameRule, shown=TEN_SECONDS, start=None, end=None) -> list[int]:
    return found.choose(shown, shown.span(start, end))


@pytest.mark.parametrize(
    "name, count, numbers",  # sampled by transformers 5.19 from 10 s at 30 frames per second
    [
        ("Qwen2VL", 20, [0, 15, 30, 285]), ("Qwen3VL", 20, [0, 16, 31, 299]), ("Glm4v", 20, [0, 15, 30, 285]),
        ("Glm46V", 60, [0, 5, 10, 295]), ("InternVL", 20, [7, 22, 37, 292]), ("SmolVLM", 20, [0, 15, 31, 299]),
        ("LlavaOnevision", 20, [0, 15, 30, 285]), ("PerceptionLM", 20, [0, 15, 30, 285]),
        ("MiniCPMV4_6", 10, [0, 30, 60, 270]), ("Gemma4", 32, [0, 9, 18, 290]), ("Kimi_K25", 20, [0, 15, 30, 285]),
        (None, 20, [0, 16, 31, 299]),
    ],
)  # fmt: skip
def test_the_checkpoints_own_rule_chooses_frames(name, count, numbers):
    found = chosen(rule(name))
    assert (len(found), [*found[:3], found[-1]]) == (count, numbers)


@pytest.mark.parametrize(
    "name, pixels", [("Qwen2VL", 28 * 28), ("Qwen3VL", 32 * 32), ("InternVL", None), ("Gemma4", None), (None, 1)]
)
def test_the_smallest_limit_on_a_frame_is_that_of_one_token(name, pixels):
    assert smallest_frame(rule(name).processor) == pixels


def test_frames_are_thinned_to_a_multiple_of_the_temporal_patch():
    assert chosen(rule("Qwen2VL", max_frames=7)) == [0, 60, 120, 165, 225, 285]
    assert chosen(rule("Kimi_K25", max_frames=7)) == [0, 90, 195, 285]
    assert chosen(rule("InternVL", max_frames=3)) == [7, 157, 292]
    assert len(chosen(rule("Qwen2VL"), constant(18000, 30.0))) == 64


@pytest.mark.parametrize("joined, least, most", [(1, 4, 7), (2, 4, 7), (2, 5, 6), (2, 3, 5), (2, 1, 3), (4, 5, 11)])
def test_the_number_of_frames_is_within_the_settings(joined, least, most):
    found = rule({1: "InternVL", 2: "Qwen2VL", 4: "Kimi_K25"}[joined], min_frames=least, max_frames=most)
    found.check()
    for total in range(1, 200):
        frames = chosen(found, constant(total, 10.0))
        assert len(frames) % joined == 0 and len(frames) <= most
        assert len(set(frames)) >= min(least, total)


@pytest.mark.parametrize("name, least, most", [("Qwen2VL", 5, 5), ("Kimi_K25", 5, 7), ("Kimi_K25", 1, 3)])
def test_settings_without_a_possible_number_of_frames_are_refused(name, least, most):
    with pytest.raises(ConfigError, match=rf"data.max_frames {most} is too small.* from data.min_frames {least} on"):
        rule(name, min_frames=least, max_frames=most).check()


def test_of_few_frames_all_are_taken_and_the_last_is_repeated():
    assert chosen(rule("Qwen2VL"), constant(4, 30.0)) == [0, 1, 2, 3]
    assert chosen(rule("Qwen2VL"), constant(3, 30.0)) == [0, 1, 2, 2]
    assert chosen(rule("Kimi_K25"), constant(1, 30.0)) == [0, 0, 0, 0]
    assert chosen(rule("InternVL"), constant(1, 30.0)) == [0]
    assert len(chosen(rule("InternVL", min_frames=6), constant(30, 30.0))) == 6  # one second


def test_a_number_of_frames_is_rounded_down_to_a_multiple_of_the_temporal_patch():
    """transformers rounds it to the nearest, which may be more than the video has."""
    assert chosen(rule("Qwen2VL", num_frames=8), constant(7, 30.0)) == [0, 1, 2, 3, 4, 5]
    assert chosen(rule("Qwen2VL", num_frames=7)) == [0, 50, 100, 150, 200, 250]
    assert chosen(rule("Qwen2VL", num_frames=1, min_frames=1)) == [0, 150]
    assert chosen(rule("Kimi_K25", num_frames=7), constant(7, 30.0)) == [0, 1, 3, 5]


def test_a_rate_gives_the_smallest_number_of_frames_despite_rounding():
    for total in range(2, 40):  # 1 / (9 / 25) * (9 / 25) is below 1
        assert len(chosen(rule("InternVL", fps=0.5, min_frames=1), constant(total, 25.0))) == 1


def test_a_clip_has_frames_of_its_own_alone():
    assert chosen(rule("Qwen3VL"), start=2.0, end=4.0) == [60, 80, 99, 119]
    assert chosen(rule(None, num_frames=3, min_frames=1), start=9.0) == [270, 284, 299]


def test_frames_without_a_constant_rate_are_sampled_by_their_times():
    times = [0.0, 0.04, 0.08, 0.5, 0.54, 2.0, 2.04, 2.08, 5.0, 5.04]
    shown = timeline(times, 5.08, 25.0)
    ticks = [0, 40, 80, 500, 540, 2000, 2040, 2080, 5000, 5040]
    assert (shown.fps, shown.total, list(shown.ticks)) == (1000, 5080, ticks)
    assert chosen(rule(None, num_frames=6), shown) == [0, 4, 5, 7, 9]  # shown at 0, 1.02, 2.03, 3.05, 4.06 and 5.08 s


def test_settings_choose_rate_and_number():
    assert len(chosen(rule("Qwen2VL", fps=1))) == len(chosen(rule(None, fps=1))) == 10
    assert len(chosen(rule("SmolVLM", num_frames=8))) == len(chosen(rule("Gemma4", num_frames=8))) == 8


@pytest.mark.parametrize(
    "name, setting", [("Glm46V", "fps"), ("Glm4v", "num_frames"), ("Gemma4", "fps"), ("MiniCPMV4_6", "num_frames")]
)
def test_a_setting_that_the_processor_ignores_is_refused(name, setting):
    with pytest.raises(ConfigError, match=rf"data.{setting} has no effect on the checkpoint's {name}VideoProcessor"):
        rule(name, **{setting: 4}).check()
    rule(name).check()
    rule("Qwen3VL", **{setting: 4}).check()


def test_fewer_frames_than_the_tower_joins_are_refused():
    with pytest.raises(ConfigError, match=r"data\.max_frames 1 is too small: the checkpoint's tower joins 2 frames"):
        rule("Qwen3VL", min_frames=1, max_frames=1).check()


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen3VL", "Glm4v", "Glm46V"])
def test_limits_are_of_one_frame_in_each_family(name):
    for count in (4, 64):
        width, height = rule(name, video_max_pixels=50_000).size(count, 1280, 720)
        assert 35_000 < width * height <= 50_000
        width, height = rule(name, video_min_pixels=200_000, video_max_pixels=300_000).size(count, 64, 48)
        assert 200_000 <= width * height <= 300_000
        width, height = rule(name, video_max_pixels=20_000).size(count, 64, 48)
        assert width * height <= 20_000
        width, height = rule(name, video_total_pixels=count * 40_000).size(count, 1280, 720)
        assert 30_000 < width * height <= 40_000


@pytest.mark.parametrize("name", ["Gemma4", "InternVL", "Kimi_K25", "SmolVLM"])
def test_limits_are_refused_by_a_processor_with_one_size(name):
    with pytest.raises(ConfigError, match=f"data.video_max_pixels has no effect on the checkpoint's {name}Video"):
        rule(name, video_max_pixels=50_000).check()


def test_without_a_processor_frames_keep_their_shape_within_the_limits():
    assert rule(None).size(8, 640, 360) == (640, 360)
    assert rule(None, video_max_pixels=57_600).size(8, 640, 360) == (320, 180)
    assert rule(None, video_total_pixels=8 * 57_600).size(8, 640, 360) == (320, 180)
    assert rule(None, video_min_pixels=921_600).size(8, 640, 360) == (1280, 720)


@pytest.mark.parametrize(
    "name",
    ["Qwen2VL", "Qwen3VL", "Glm4v", "InternVL", "LlavaOnevision", "PerceptionLM", "Gemma4", "Kimi_K25", "SmolVLM"],
)
def test_resized_frames_give_the_processor_the_pixels_that_it_makes_itself(name):
    found = rule(name)
    frames = np.random.default_rng(0).integers(0, 255, (8, 180, 320, 3), dtype=np.uint8)
    width, height = found.size(8, 320, 180)
    resized = np.stack([found.resized(frame, width, height) for frame in frames])
    assert np.array_equal(pixels(found.processor, resized), pixels(found.processor, frames))


def pixels(processor: Any, frames: np.ndarray) -> np.ndarray:
    metadata = VideoMetadata(total_num_frames=300, fps=30.0, duration=10.0, frames_indices=list(range(0, 80, 10)))
    capped = {"cap_pixels_per_frame": True} if "cap_pixels_per_frame" in processor.valid_kwargs.__annotations__ else {}
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    made = processor([video], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt", **capped)
    return next(value for key, value in made.items() if key.startswith("pixel_values")).numpy()
