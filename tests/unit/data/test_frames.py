import numpy as np
import pytest
from PIL import Image

from rl_vlm.data.frames import frames_as_images
from rl_vlm.types import Sample, Video


def clip(*colors: int, fps: float = 2.0) -> Video:
    """A clip with a frame of each color."""
    frames = np.stack([np.full((8, 16, 3), color, dtype=np.uint8) for color in colors])
    return Video(frames, tuple(range(0, 12 * len(colors), 12)), 12 * fps, 12 * len(colors), len(colors) / fps)


def test_frames_are_images_after_their_times_in_the_order_of_blocks():
    picture, other = Image.new("RGB", (4, 4), (7, 7, 7)), Image.new("RGB", (4, 4), (9, 9, 9))
    content = [{"type": "image"}, {"type": "video"}, {"type": "image"}, {"type": "text", "text": "Which?"}]
    messages = [{"role": "user", "content": content}, {"role": "user", "content": [{"type": "video"}]}]
    sample = Sample(
        "s", messages, [picture, other], {"solution": "1"}, "p", {1: b"file"}, ["a.png", None],
        [clip(10, 20, 30), clip(40, fps=0.5)],
    )  # fmt: skip
    found = frames_as_images(sample)
    image = {"type": "image"}
    times = [{"type": "text", "text": text} for text in ("0.0 s: ", "0.5 s: ", "1.0 s: ")]
    assert [message["content"] for message in found.messages] == [
        [image, times[0], image, times[1], image, times[2], image, image, {"type": "text", "text": "Which?"}],
        [times[0], image],
    ]
    assert [each.getpixel((0, 0)) for each in found.images] == [(c,) * 3 for c in (7, 10, 20, 30, 9, 40)]
    assert found.encoded_images == {4: b"file"}
    assert found.image_files == ["a.png", None, None, None, None, None]
    assert (found.videos, found.frames_of) == ([], sample.videos)
    assert (found.columns, found.prompt) == ({"solution": "1"}, "p")
    assert sample.messages[1]["content"] == [{"type": "video"}]


@pytest.mark.parametrize(("fps", "text"), [(2.0, "0.5 s: "), (3.0, "0.3 s: "), (0.01, "100.0 s: ")])
def test_a_time_has_one_decimal(fps: float, text: str):
    sample = Sample("s", [{"role": "user", "content": [{"type": "video"}]}], [], {}, "", videos=[clip(1, 2, fps=fps)])
    assert frames_as_images(sample).messages[0]["content"][2]["text"] == text


def test_a_sample_without_videos_stays_as_it_is():
    sample = Sample("s", [], [], {}, "")
    assert frames_as_images(sample) is sample
