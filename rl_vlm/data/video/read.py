"""Reads the video of a row: its header before the run, and the frames that the model gets when the row is drawn.

value ─ video_clip ─► Clip ─ open_frames ─► FrameSource ─ FrameRule: numbers and size ─► Video
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from rl_vlm.data.images import encoded_image, image_content, open_image
from rl_vlm.data.media import media_errors
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.data.video.pictures import Animation, Pictures, Pixels, folder_frames
from rl_vlm.data.video.process import decoders
from rl_vlm.data.video.source import ClipHeader, FrameSource, Header, TooLong, refuse_unequal
from rl_vlm.data.video.timeline import interval
from rl_vlm.data.video.values import Clip, video_clip

if TYPE_CHECKING:
    from rl_vlm.config.schema import DataConfig
    from rl_vlm.types import Video

STILLS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
"""First bytes of images that are no animations."""
BLOCK, NUM_BLOCKS = 2**16, 16
"""Bytes of a block, and blocks of a file, that its digest reads."""
PLAYLISTS = (b"#EXTM3U", b"<MPD", b"ffconcat")


def read_video(
    value: Any, folder: Path, rule: FrameRule, where: str, checked: ClipHeader | None = None, decode: bool = True
) -> Video:
    """Decode the frames of a video that `rule` chooses, in the size that the model's tower gets.

    `value` is any value that `video_clip` takes. `checked` is the header that the check before the run has found. If
    `decode` is false, the frames are black, and have the same times and sizes. Raises DataError with a message that
    begins with `where`, also if the video has another header now.
    """
    from rl_vlm.types import Video  # imports torch, which a dry run does not need

    with media_errors("video", value, where):
        clip = video_clip(value)
        with open_frames(clip, folder, rule.data) as source:
            refuse_changed(clip_header(source, clip, folder), checked)
            check_header(source.header, clip, rule.data)
            shown = source.timeline
            span = shown.span(clip.start, clip.end)
            _, length = shown.clip(span)
            refuse_long(length / shown.fps, rule.data)
            numbers = rule.choose(shown, span)
            frames = decoded(source, numbers, rule) if decode else black(source.header, len(numbers), rule)
        ticks = tuple(int(shown.ticks[number]) for number in numbers)
        path = None if clip.path is None else str((folder / clip.path).absolute())
        return Video(frames, ticks, shown.fps, length, shown.duration, path, source.reader)


def decoded(source: FrameSource, numbers: Sequence[int], rule: FrameRule) -> np.ndarray:
    """Return the frames with these numbers, in the size that the model's tower gets."""
    distinct, places = np.unique(numbers, return_inverse=True)
    return np.stack(resized_frames(source.read(distinct.tolist()), len(numbers), rule))[places]


def black(header: Header, num_frames: int, rule: FrameRule) -> np.ndarray:
    """Return black frames in the size that the model's tower gets. All pixels are one value in memory."""
    width, height = rule.size(num_frames, header.width, header.height)
    return np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (num_frames, height, width, 3))


def resized_frames(read: Iterator[np.ndarray], num_frames: int, rule: FrameRule) -> list[np.ndarray]:
    """Resize frames to the tower's input size, one after another. Raises ValueError if they have several sizes."""
    frames, first = [], None
    for number, pixels in enumerate(read):
        size = pixels.shape[1], pixels.shape[0]
        first = first or size
        refuse_unequal(number, size, first)
        frames.append(rule.resized(pixels, *rule.size(num_frames, *size)))
    return frames


def check_video(value: Any, folder: Path, rule: FrameRule, where: str) -> ClipHeader:
    """Read and return the header of a video.

    Raises the DataError of `read_video` if the video is missing, its header is bad or it is too large. No frame is
    decoded, so damage after the header is not found.
    """
    with media_errors("video", value, where):
        clip = video_clip(value)
        with open_frames(clip, folder, rule.data) as source:
            check_header(source.header, clip, rule.data)
            return clip_header(source, clip, folder)


def clip_header(source: FrameSource, clip: Clip, folder: Path) -> ClipHeader:
    """Read and return the header of a video, and the number of its bytes."""
    header, num_bytes = source.header, 0  # its errors name the frame
    for content in contents(clip, folder):
        if not isinstance(content, np.ndarray) and not isinstance(image_content(content), Image.Image):
            with open_image(content, folder) as file:
                num_bytes += file.seek(0, os.SEEK_END)
    return ClipHeader(header, clip.start, clip.end, num_bytes)


def refuse_changed(found: ClipHeader, checked: ClipHeader | None) -> None:
    """Raise ValueError if a video has another header than the check before the run has found."""
    if checked is not None and found != checked:
        raise ValueError(f"it has changed since the check before the run. Then: {checked}. Now: {found}.")


def video_digest(value: Any, folder: Path, where: str) -> bytes:
    """Hash a video and the interval of a clip, without reading all of a large file. Raises like `read_video`.

    Equal files have equal digests, whatever their names and dates. Files with equal digests have equal sizes and equal
    bytes in `NUM_BLOCKS` evenly spaced blocks, the first and the last among them. Frames of a list are hashed whole.
    """
    with media_errors("video", value, where):
        clip = video_clip(value)
        digest = blake2b(repr((clip.fps, clip.start, clip.end)).encode(), digest_size=16)
        for content in contents(clip, folder):
            if isinstance(content, np.ndarray):
                digest.update(repr(content.shape).encode() + content.tobytes())
            elif isinstance(image_content(content), Image.Image):
                digest.update(encoded_image(content, folder))
            else:
                with open_image(content, folder) as file:
                    hash_blocks(file, digest)
        return digest.digest()


def hash_blocks(file: Any, digest: Any) -> None:
    """Add the size of a file and evenly spaced blocks of it to a digest."""
    size = file.seek(0, os.SEEK_END)
    digest.update(f"{size} ".encode())
    for start in np.unique(np.linspace(0, max(size - BLOCK, 0), min(NUM_BLOCKS, -(-size // BLOCK))).astype(int)):
        file.seek(int(start))
        digest.update(file.read(BLOCK))


def contents(clip: Clip, folder: Path) -> Sequence[Any]:
    """Return the frames of a list or folder, or the video itself."""
    if isinstance(clip.content, list | tuple):
        return clip.content
    is_folder = clip.path is not None and is_of_frames(clip, folder)
    return folder_frames(folder / str(clip.path)) if is_folder else [clip.content]


def is_of_frames(clip: Clip, folder: Path) -> bool:
    """Return whether a clip is an array, a list or a folder of frames, and no file."""
    is_folder = clip.path is not None and (folder / clip.path).is_dir()
    return isinstance(clip.content, np.ndarray | list | tuple) or is_folder


@contextmanager
def open_frames(clip: Clip, folder: Path, data: DataConfig) -> Iterator[FrameSource]:
    """Open the video of a clip. Raises TypeError if it is none, OSError or ValueError if it cannot be read."""
    content, limit = clip.content, data.max_image_pixels
    if isinstance(content, np.ndarray):
        yield Pixels(content, clip.fps, limit)
    elif is_of_frames(clip, folder):
        yield Pictures(contents(clip, folder), folder, clip.fps, limit)
    elif clip.path is not None or isinstance(content, bytes) or hasattr(content, "read"):
        if clip.fps is not None:
            raise ValueError(
                "fps beside a video file would have no effect; set data.fps. Leave a column out with "
                "data.ignore_columns."
            )
        with open_file(content, folder, limit) as source:
            yield source
    else:
        raise TypeError(
            f"found a {type(content).__name__}, expected a path, bytes, a list or folder of frames, an array, or a "
            "dict of one of them."
        )


@contextmanager
def open_file(content: Any, folder: Path, max_pixels: int) -> Iterator[FrameSource]:
    """Open a path, bytes or an open file by its content.

    Raises ValueError for an empty file, an image, a playlist, or anything but a regular file.
    """
    with open_image(content, folder) as file:
        head = file.read(16)
        file.seek(0)
        refuse_others(head)
        if head.startswith(b"GIF8") or (head.startswith(b"RIFF") and head[8:12] == b"WEBP"):
            yield Animation(file, max_pixels)
            return
        path = Clip(content).path
        source = file.read() if path is None else str((folder / path).absolute())
    with decoders.open(source, max_pixels) as video:
        yield video


def refuse_others(head: bytes) -> None:
    """Raise ValueError if a file is empty, an image or a playlist, by its first bytes."""
    if not head:
        raise ValueError("the file is empty.")
    if found := next((name for start, name in STILLS.items() if head.startswith(start)), None):
        raise ValueError(f"it is an image ({found}), not a video; put it into column `image`.")
    if head.lstrip().startswith(PLAYLISTS):
        raise ValueError("it is a playlist, which names other files. Give the path of a video.")


def check_header(header: Header, clip: Clip, data: DataConfig) -> None:
    """Raise ValueError if a clip is outside of its video, and TooLong if it has too many seconds."""
    start, end = interval(clip.start, clip.end, header.duration)
    refuse_long(end - start, data)


def refuse_long(seconds: float, data: DataConfig) -> None:
    """Raise TooLong if a video or clip has more seconds than the setting allows."""
    if seconds > data.max_video_seconds:
        raise TooLong(
            f"{seconds:.6g} s are more than data.max_video_seconds = {data.max_video_seconds:g}. Give the part that "
            "counts with video_start and video_end, or raise that limit."
        )
