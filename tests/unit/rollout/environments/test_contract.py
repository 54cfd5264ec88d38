"""Videos in the content of tools and environments: frames as images after their times."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_vlm.errors import DataError
from rl_vlm.rollout.environments.contract import read_content

FRAMES = np.stack([np.full((4, 6, 3), 40 * number, dtype=np.uint8) for number in range(3)])
IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def levels(files: tuple[bytes, ...]) -> list[Any]:
    return [Image.open(io.BytesIO(file)).getpixel((0, 0)) for file in files]


@pytest.mark.parametrize("frames", [FRAMES, [Image.fromarray(each) for each in FRAMES], list(FRAMES)])
def test_the_frames_of_a_video_are_images_after_their_times(frames: Any):
    found = read_content([text("You moved."), {"type": "video", "video": frames, "fps": 4}, text("Now?")], 100)
    assert found.blocks == [
        text("You moved."), text("0.0 s: "), IMAGE, text("0.2 s: "), IMAGE, text("0.5 s: "), IMAGE, text("Now?"),
    ]  # fmt: skip
    assert levels(found.images) == [(0, 0, 0), (40, 40, 40), (80, 80, 80)]


def test_frames_without_a_rate_have_two_a_second():
    blocks = read_content([{"type": "video", "video": FRAMES}, {"type": "image", "image": FRAMES[1]}], 100).blocks
    assert blocks == [text("0.0 s: "), IMAGE, text("0.5 s: "), IMAGE, text("1.0 s: "), IMAGE, IMAGE]


@pytest.mark.parametrize(
    ("video", "error", "message"),
    [
        ("a.mp4", ValueError, "a file is not read"), (np.zeros((65, 2, 2, 3), np.uint8), ValueError, "more than 64"),
        (np.zeros((2, 20, 20, 3), np.uint8), DataError, "20 × 20 = 400 pixels are more than"),
        ([FRAMES[0], FRAMES[0][:2]], DataError, "The frames of a video have one size"), ([], DataError, "environment"),
        (None, ValueError, "a block of type 'video' has no text, image or video"),
    ],
)  # fmt: skip
def test_videos_that_are_refused(video: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        read_content([{"type": "video", "video": video}], 100)
