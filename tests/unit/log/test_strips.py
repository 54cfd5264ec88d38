"""Strips of videos: which frames they show, their size, and where the completions file has them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rl_vlm.data.frames import frames_as_images
from rl_vlm.log.completions import size_columns
from rl_vlm.log.images import PromptImages
from rl_vlm.log.strips import shown_frames, strip_of, time_text
from rl_vlm.types import Prompt, Sample, Video


def clip(levels: list[int], height: int = 48, width: int = 64) -> Video:
    """A video at two frames per second. Each frame has one level of gray."""
    frames = np.stack([np.full((height, width, 3), level, dtype=np.uint8) for level in levels])
    return Video(frames, tuple(range(0, 10 * len(levels), 10)), 20.0, 10 * len(levels), len(levels) / 2)


def video_sample(*media: Image.Image | Video) -> Sample:
    blocks = [{"type": "video" if isinstance(each, Video) else "image"} for each in media]
    images = [each for each in media if not isinstance(each, Video)]
    videos = [each for each in media if isinstance(each, Video)]
    return Sample("row", [{"role": "user", "content": blocks}], images, {}, "", videos=videos)


def test_frames_are_at_even_distances_with_the_first_and_the_last():
    assert shown_frames(1) == [0]
    assert shown_frames(3) == [0, 1, 2]
    assert shown_frames(15) == [0, 2, 4, 6, 8, 10, 12, 14]


def test_a_strip_has_frames_of_96_pixels_from_left_to_right():
    strip = strip_of(clip([10, 90, 170]))
    assert strip.size == (3 * 128 + 2 * 2, 96)
    assert [strip.getpixel((x, 20)) for x in (5, 135, 265)] == [(10,) * 3, (90,) * 3, (170,) * 3]
    assert strip.getpixel((128, 20)) == (255, 255, 255)  # between frames
    assert strip.getpixel((5, 92)) != (10,) * 3  # the time, on black
    assert strip_of(clip([10], height=100, width=400)).size == (192, 48)
    assert strip_of(clip([10] * 30, height=9, width=16)).size == (8 * 171 + 7 * 2, 96)


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0.0 s"), (7.54, "7.5 s"), (67.5, "1:07.5"), (3601.0, "60:01.0")])
def test_times(seconds: float, text: str):
    assert time_text(seconds) == text


def test_a_strip_is_kept_as_it_is_and_once(tmp_path: Path):
    images = PromptImages(tmp_path / "images", num_prompts=1)
    video = clip(list(range(0, 200, 10)))
    (path,) = images.write(video_sample(video))["videos"]
    with Image.open(tmp_path / path) as strip:
        assert strip.size == (8 * 128 + 7 * 2, 96)
    assert images.write(video_sample(video)) == {"videos": [path]}
    later = Video(video.frames, tuple(i + 40 for i in video.indices), 20.0, 200, 30.0)
    assert images.write(video_sample(later))["videos"] != [path]  # the same frames at other times


def test_frames_that_are_images_are_a_strip_as_well(tmp_path: Path):
    video, picture = clip([10, 90]), Image.new("RGB", (30, 20), (200, 0, 0))
    native = video_sample(video, picture)
    shown = frames_as_images(native)
    assert len(shown.images) == 3 and shown.own_images == shown.images[2:]
    images = PromptImages(tmp_path / "images", num_prompts=1)
    assert images.write(shown) == images.write(native)
    columns = {"image_sizes": [[30, 20]], "video_duration": [1.0], "video_frame_times": [[0.0, 0.5]]}
    prompts = [Prompt(sample, torch.arange(3), {}, {}, sizes) for sample, sizes in (
        (native, [(28, 28)]), (shown, [(56, 28), (56, 28), (28, 28)]),
    )]  # fmt: skip
    assert [size_columns(prompt) for prompt in prompts] == [columns | {"model_image_sizes": [[28, 28]]}] * 2
    assert "video_duration" not in size_columns(Prompt(Sample("s", [], [picture], {}, ""), torch.arange(3), {}, {}))
