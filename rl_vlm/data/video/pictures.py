"""Videos that are pictures: a list or a folder of frames, an array, an animated GIF or WEBP."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image, ImageSequence

from rl_vlm.data.images import SUFFIX, check_image, image_size, read_image
from rl_vlm.data.video.animations import frame_lengths
from rl_vlm.data.video.source import FRAME_RATE, FrameSource, Header, TooLong, refuse_unequal, too_large
from rl_vlm.data.video.timeline import Timeline, constant, timeline

PILLOW = f"Pillow {PIL.__version__}"

logger = logging.getLogger(__name__)

MOST_FRAMES = 10_000
"""Frames of an animation. They are drawn over each other, so the last one needs all."""
MOST_PIXELS = 1_000_000_000
"""Pixels of all frames of an animation. Pillow draws them in about a minute if they are noise."""


class Pictures(FrameSource):
    """Frames that are separate images of equal sizes."""

    reader = PILLOW

    def __init__(self, frames: Sequence[Any], folder: Path, fps: float | None, max_pixels: int) -> None:
        if not frames:
            raise ValueError("its list of frames is empty.")
        self.frames = frames
        self.folder = folder
        self.max_pixels = max_pixels
        self.rate = rate(fps)

    @cached_property
    def header(self) -> Header:
        """Size and number of the frames. Raises DataError for an unreadable header, ValueError for unequal sizes."""
        sizes = []
        for index, frame in enumerate(self.frames):
            where = f"frame {index}"
            check_image(frame, self.folder, self.max_pixels, where)
            sizes.append(image_size(frame, self.folder, where))
            refuse_unequal(index, sizes[-1], sizes[0])
        width, height = sizes[0]
        return Header(width, height, len(sizes), len(sizes) / self.rate)

    @property
    def timeline(self) -> Timeline:
        return constant(len(self.frames), self.rate)

    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        for number in numbers:
            yield np.asarray(read_image(self.frames[number], self.folder, self.max_pixels, f"frame {number}")[0])


class Pixels(FrameSource):
    """Frames in an array."""

    def __init__(self, frames: np.ndarray, fps: float | None, max_pixels: int) -> None:
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or 0 in frames.shape:
            raise ValueError(
                f"found an array of {frames.dtype} with shape {frames.shape}, expected uint8 with shape (frames, "
                "height, width, 3)."
            )
        self.frames = frames
        self.rate = rate(fps)
        count, height, width, _ = frames.shape
        too_large(width, height, max_pixels)
        self.header = Header(width, height, count, count / self.rate)

    @property
    def timeline(self) -> Timeline:
        return constant(len(self.frames), self.rate)

    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        return (self.frames[number] for number in numbers)


class Animation(FrameSource):
    """An animated GIF or WEBP. Its frames are drawn over each other, so they are read in sequence."""

    reader = PILLOW

    def __init__(self, file: Any, max_pixels: int) -> None:
        self.lengths = frame_lengths(file)
        file.seek(0)
        self.image = Image.open(file, formats=("GIF", "WEBP"))
        too_large(*self.image.size, max_pixels)
        count = len(self.lengths)
        if count <= 1:  # a WEBP of one image has no frames
            raise ValueError(f"it is an image ({self.image.format}) of one frame, not a video; put it into `image`.")
        if count > MOST_FRAMES:
            raise TooLong(f"its {count} frames are more than {MOST_FRAMES}. Write a video file, which needs not all.")
        width, height = self.image.size
        if count * width * height > MOST_PIXELS:
            raise TooLong(
                f"its {count} frames of {width} × {height} pixels have more than {MOST_PIXELS} pixels. Write a video "
                "file, which needs not all."
            )
        self.header = Header(width, height, count, sum(self.lengths) / 1000)

    @cached_property
    def timeline(self) -> Timeline:
        *starts, end = accumulate(self.lengths, initial=0)
        return timeline([start / 1000 for start in starts], end / 1000)

    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        wanted = set(numbers)
        for number, frame in enumerate(ImageSequence.Iterator(self.image)):
            if number in wanted:
                yield np.asarray(frame.convert("RGB"))


def folder_frames(folder: Path) -> list[Path]:
    """Return the images of a folder in the natural order of their names: 2.png is before 10.png.

    Raises ValueError if it has none.
    """
    files = [path for path in folder.iterdir() if SUFFIX.search(path.name) and path.is_file()]
    if not files:
        raise ValueError(f"folder {folder} has no images.")
    return sorted(files, key=lambda path: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", path.name)])


def rate(fps: float | None) -> float:
    """Return the rate of given frames. Without one, log that the default is taken."""
    if fps is None:
        logger.info("frames that are given without `fps` have %g frames per second", FRAME_RATE)
    return FRAME_RATE if fps is None else fps
