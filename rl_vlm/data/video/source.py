"""A video that can be read: its header, the times of its frames, and some of its frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rl_vlm.data.images import TooManyPixels
from rl_vlm.data.media import AboveLimit
from rl_vlm.data.video.timeline import Timeline

FRAME_RATE = 2.0
"""Frames per second to sample, if neither the settings nor the checkpoint say so, and of frames without a rate."""


class TooLong(AboveLimit):
    """The video has more seconds than `data.max_video_seconds`, or too many frames to decode."""


class Header(NamedTuple):
    """What is known about a video before its frames are read."""

    width: int
    height: int
    num_frames: int
    duration: float
    """Seconds."""


class ClipHeader(NamedTuple):
    """The header of a video, and the part of it that a row takes."""

    header: Header
    start: float | None
    """Second of the file at which the clip starts, or None for the start of the file."""
    end: float | None
    num_bytes: int
    """Bytes of the file, or of the files of the frames."""

    def __str__(self) -> str:
        """Return the text for error messages."""
        width, height, num_frames, duration = self.header
        return f"{num_frames} frames of {width} × {height} pixels, {duration:.6g} s, {self.num_bytes} bytes"


class FrameSource(ABC):
    """The frames of one video."""

    header: Header
    """Size and length of the video."""
    reader = ""
    """Name and version of the software that decodes the frames."""

    @property
    @abstractmethod
    def timeline(self) -> Timeline:
        """The times of all frames. Frames are not decoded."""

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frames with these numbers, upright, as RGB pixels (height, width, 3). The numbers increase."""


def too_large(width: int, height: int, max_pixels: int) -> None:
    """Raise TooManyPixels if a frame has more pixels than `data.max_image_pixels`."""
    if width * height > max_pixels:
        raise TooManyPixels(
            f"{width} × {height} = {width * height} pixels are more than data.max_image_pixels = {max_pixels}. "
            "Shrink the video, or raise that limit."
        )


def refuse_unequal(index: int, size: tuple[int, int], first: tuple[int, int]) -> None:
    """Raise ValueError if a frame has another width or height than the first frame."""
    if size != first:
        raise ValueError(
            f"frame {index} has {size[0]} × {size[1]} pixels, and the first has {first[0]} × {first[1]}. The frames of "
            "a video have one size."
        )
