"""Images and videos of a row, and clips that environments show."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from importlib.metadata import version
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP_HEAD = b"PK"
"""First bytes of the file of a clip, which is NumPy's. No file of an image has them."""


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of one video. They are chosen once, and have the size that the vision tower gets."""

    frames: UInt8[np.ndarray, "frames height width 3"]
    indices: tuple[int, ...]
    """The number of each frame in the file, or its milliseconds if the file has no constant frame rate."""
    fps: float
    """Frames per second of the file, or 1000 for milliseconds."""
    total_num_frames: int
    """Number of frames from the clip's start to its end, or its milliseconds. Processors divide by it to get the
    seconds between the chosen frames."""
    duration: float
    """Seconds of the file."""
    path: str | None = None
    """The file or folder, or None if the row holds the video itself."""
    reader: str = ""
    """Name and version of the software that decoded the frames."""

    @cached_property
    def digest(self) -> str:
        """A hash of the frames."""
        return blake2b(self.frames.tobytes(), digest_size=16).hexdigest()

    @property
    def times(self) -> list[float]:
        """The second of the file at which each frame is shown."""
        return [index / self.fps for index in self.indices]

    @property
    def metadata(self) -> dict[str, Any]:
        """The times of the frames, as processors read them. Each call makes a new list of indices, since processors
        change it."""
        height, width = self.frames.shape[1:3]
        return {
            "total_num_frames": self.total_num_frames, "fps": self.fps, "frames_indices": list(self.indices),
            "duration": self.duration, "height": height, "width": width,
        }  # fmt: skip

    def encoded(self) -> bytes:
        """Return frames and times as a file, compressed without loss. Equal clips have equal files."""
        file = BytesIO()
        times = {name: getattr(self, name) for name in CLIP_TIMES}
        np.savez_compressed(file, frames=self.frames, **times)
        return file.getvalue()

    @classmethod
    def decoded(cls, file: bytes) -> Video:
        """Return the clip in a file of `encoded`."""
        with np.load(BytesIO(file)) as stored:
            indices, *others = (stored[name].tolist() for name in CLIP_TIMES)
            return cls(stored["frames"], tuple(indices), *others)


CLIP_TIMES = ("indices", "fps", "total_num_frames", "duration")
"""Fields of a `Video` in the file of a clip, after its frames."""


def is_clip(file: bytes) -> bool:
    """Return whether a file that an environment has shown holds a clip. Otherwise it holds an image."""
    return file.startswith(CLIP_HEAD)


@cache
def pillow_version() -> str:
    """Return the version of the package that decodes images."""
    return version("pillow")


class MediumRead(NamedTuple):
    """The pixels of an image or a video, in plain values for checkpoints."""

    kind: str
    path: str | None
    size: tuple[int, int]
    """Width and height."""
    indices: tuple[int, ...]
    """`Video.indices`, or nothing for an image."""
    fps: float | None
    """`Video.fps`, or None for an image."""
    digest: str
    """A hash of the pixels."""
    reader: str
    """Name and version of the software that decoded the pixels."""
    total_num_frames: int | None = None
    """`Video.total_num_frames`, or None for an image and in older checkpoints."""
    duration: float | None = None
    """`Video.duration`, or None like `total_num_frames`."""

    @classmethod
    def of_image(cls, image: Image, path: str | None) -> MediumRead:
        digest = blake2b(image.tobytes(), digest_size=16).hexdigest()
        return cls("image", path, image.size, (), None, digest, f"Pillow {pillow_version()}")

    @classmethod
    def of_video(cls, video: Video) -> MediumRead:
        height, width = video.frames.shape[1:3]
        return cls(
            "video", video.path, (width, height), video.indices, video.fps, video.digest, video.reader,
            video.total_num_frames, video.duration,
        )  # fmt: skip

    def is_same(self, other: MediumRead) -> bool:
        """Return whether both have equal pixels and times. The path and the reader may differ.

        Lengths are ignored if one of them is unknown.
        """
        ignored: dict[str, Any] = {"path": None, "reader": ""}
        if None in (self.duration, other.duration):
            ignored |= {"total_num_frames": None, "duration": None}
        return self._replace(**ignored) == other._replace(**ignored)

    def __str__(self) -> str:
        """Return the text for error messages."""
        frames = f", frames {', '.join(map(str, self.indices))} at {self.fps:g} per second" if self.indices else ""
        length = "" if self.duration is None else f", total_num_frames {self.total_num_frames}, {self.duration:g} s"
        reader = f", read with {self.reader}" if self.reader else ""
        width, height = self.size
        pixels = f"{width} × {height} pixels, digest {self.digest}"
        return f"{self.path or 'a value of the row'}{frames}{length}, {pixels}{reader}"
