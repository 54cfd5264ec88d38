"""Clips in the content of tools and environments.

    block ─ read_clip ─► ShownClip, a copy of frames or of a file ─ choose_frames ─► Video ─ encoded ─► file of the clip

`read_clip` runs where the environment is, which can be another process. `choose_frames` runs in the run's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_vlm.data.images import decode_image, open_image
from rl_vlm.data.media import AboveLimit, media_errors, path_label
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.data.video.read import is_of_frames, open_frames, read_video
from rl_vlm.data.video.timeline import FrameRange, Timeline
from rl_vlm.data.video.values import Clip, video_clip

if TYPE_CHECKING:
    from PIL.Image import Image

    from rl_vlm.types import Video

MOST_FRAMES = 64
"""Frames of a clip that an environment gives as images."""
MOST_BYTES = 128 * 2**20
"""Bytes of a video file that an environment shows."""
WHERE = "a video of the environment"


class ShownClip(NamedTuple):
    """A clip as it has arrived. These are plain values, which another process can send."""

    content: bytes
    """Pixels of the frames, or a video file."""
    shape: tuple[int, ...] | None
    """Frames, height, width and 3, or None for a file."""
    fps: float | None
    start: float | None
    end: float | None
    name: str
    """The path in error messages, or an empty text."""


class AllFrames(FrameRule):
    """Chooses all frames. The last one is repeated if the tower joins frames and one is lacking."""

    def choose(self, shown: Timeline, span: FrameRange) -> list[int]:
        """Return the numbers of all frames of the part."""
        numbers = list(range(span.first, span.stop))
        return numbers + numbers[-1:] * (-len(numbers) % self.joined)


def read_clip(block: Mapping[str, Any], max_pixels: int) -> ShownClip:
    """Copy the frames or the file of a block with a video. A file is not decoded.

    Raises DataError with the clip's name if it cannot be read, or if it has too many frames or bytes.
    """
    with media_errors("video", block.get("video"), WHERE):
        clip = video_clip({name: value for name, value in block.items() if name != "type"})
        name = path_label(block.get("video"))
        if not is_of_frames(clip, Path.cwd()):
            with open_image(clip.content, Path.cwd()) as file:
                content = file.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise AboveLimit(f"the file has more than {MOST_BYTES // 2**20} MiB, the most that can be shown.")
            return ShownClip(content, None, clip.fps, clip.start, clip.end, name)
        frames = read_frames(clip, max_pixels)
        return ShownClip(frames.tobytes(), frames.shape, clip.fps, clip.start, clip.end, name)


def read_frames(clip: Clip, max_pixels: int) -> np.ndarray:
    """Return all frames of a list, a folder or an array. Raises AboveLimit for more than `MOST_FRAMES`."""
    from PIL import Image

    from rl_vlm.config.schema import DataConfig  # not at the top: pydantic, in each environment's process

    if isinstance(clip.content, list | tuple):
        as_images = [Image.fromarray(each) if isinstance(each, np.ndarray) else each for each in clip.content]
        clip = clip._replace(content=as_images)
    with open_frames(clip, Path.cwd(), DataConfig(max_image_pixels=max_pixels)) as source:
        number = source.header.num_frames
        if number > MOST_FRAMES:
            raise AboveLimit(f"it has {number} frames, more than {MOST_FRAMES}; return fewer, or a video file.")
        return np.stack(list(source.read(range(number))))


def choose_frames(clip: ShownClip, rule: FrameRule) -> Video:
    """Choose the frames of a clip for the model: all frames that were given as images, or frames of a file by a rule.

    Raises DataError with the clip's name if a file cannot be decoded.
    """
    content: Any = clip.content
    if clip.shape is not None:
        content, rule = np.frombuffer(content, np.uint8).reshape(clip.shape), AllFrames(rule.data, rule.processor)
    value = {"video": content, "fps": clip.fps, "video_start": clip.start, "video_end": clip.end}
    return read_video(value, Path.cwd(), rule, f"{WHERE}{clip.name}")


def decode_medium(file: bytes) -> Image | Video:
    """Return an image, or a clip, from its file. It must have been written here, or read, before."""
    from rl_vlm.types import Video, is_clip  # imports torch, which an environment's process does not need

    return Video.decoded(file) if is_clip(file) else decode_image(file)
