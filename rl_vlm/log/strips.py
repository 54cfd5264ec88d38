"""Strips: some frames of a video side by side, with their times, in one small image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rl_vlm.types import Video

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_FRAMES = 8
HEIGHT = 96
"""Pixels of a frame's height in a strip."""
FRAME_WIDTH = 192
"""Largest width of a frame in a strip. Wider frames are lower than `HEIGHT`."""
GAP = 2
"""Pixels between frames."""
WIDTH = MOST_FRAMES * (FRAME_WIDTH + GAP)
"""Largest width of a strip."""
FONT_SIZE = 12


def shown_frames(num_frames: int) -> list[int]:
    """Return the numbers of the frames in a strip: at even distances, with the first and the last one."""
    return np.linspace(0, num_frames - 1, min(num_frames, MOST_FRAMES)).round().astype(int).tolist()


def strip_of(video: Video) -> Image:
    """Draw some frames of a video from left to right, each with the second at which it is shown."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = video.frames.shape[1:3]
    share = min(HEIGHT / height, FRAME_WIDTH / width)
    size = max(1, round(width * share)), max(1, round(height * share))
    shown = shown_frames(len(video.frames))
    strip = Image.new("RGB", (len(shown) * (size[0] + GAP) - GAP, size[1]), "white")
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default(FONT_SIZE)
    for place, number in enumerate(shown):
        left = place * (size[0] + GAP)
        strip.paste(Image.fromarray(video.frames[number]).resize(size, reducing_gap=2.0), (left, 0))
        text = time_text(video.times[number])
        corner = (left + 3, size[1] - 3)
        draw.rectangle(draw.textbbox(corner, text, font, "lb"), "black")
        draw.text(corner, text, "white", font, "lb")
    return strip


def time_text(seconds: float) -> str:
    """Return the time of a frame, such as `7.5 s` or `1:07.5`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{minutes:.0f}:{rest:04.1f}"
