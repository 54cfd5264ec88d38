"""Frames of video files. Only the frames that a run takes are decoded, from the key frame before each of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np

from rl_vlm.data.video.container import (
    RIGHT_ANGLE,
    Packets,
    indexed_packets,
    load_av,
    open_container,
    read_header,
    read_packets,
)
from rl_vlm.data.video.source import FrameSource, Header, TooLong
from rl_vlm.data.video.timeline import Timeline

DECODED_PER_FRAME = 200
"""Frames that may be decoded for one that is taken, on average. A file with few key frames needs many."""


class MissedFrame(Exception):
    """A seek landed after its key frame, or decoded frames have other times than the packets."""


class Nameless:
    """An open file without its name, which FFmpeg could open by itself."""

    def __init__(self, file: Any) -> None:
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


class VideoFile(FrameSource):
    """A file or its bytes. It is opened anew for its header, for its packets and for its frames.

    A file that is damaged on purpose can hang it, so runs read files with `DecodedFile`.
    """

    def __init__(self, file: Any, max_pixels: int) -> None:
        self.file = file
        self.max_pixels = max_pixels

    @property
    def reader(self) -> str:
        return f"FFmpeg {load_av().ffmpeg_version_info}"

    @cached_property
    def header(self) -> Header:
        size = self.file.seek(0, os.SEEK_END)
        with self.opened() as (container, stream):
            return read_header(container, stream, self.max_pixels, size)

    @cached_property
    def packets(self) -> Packets:
        """Times of the frames, and which of them are key frames."""
        with self.opened() as (container, stream):
            found = indexed_packets(container, stream)
        if found is not None:
            return found
        with self.opened() as (container, stream):
            return read_packets(container, stream)

    @property
    def timeline(self) -> Timeline:
        return self.packets.timeline

    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        return (pixels for pixels in self.decoded(numbers) if pixels is not None)

    def decoded(self, numbers: Sequence[int]) -> Iterator[np.ndarray | None]:
        """Yield frames by seeking, and None for each other frame that is decoded.

        If a seek misses its frame, decode the others in sequence. Raises TooLong, before a frame is decoded, if too
        many frames must be decoded. Raises ValueError if the file is damaged.
        """
        limit, packets, done = DECODED_PER_FRAME * len(numbers), self.packets, 0
        refuse_many(num_decoded(numbers, packets.keys), limit)
        if packets.pts is not None:
            try:
                for pixels in self.by_seeking(numbers, packets):
                    done += pixels is not None
                    yield pixels
                return
            except MissedFrame:
                refuse_many(numbers[-1] + 1, limit)
        yield from self.in_sequence(numbers[done:])

    def by_seeking(self, numbers: Sequence[int], packets: Packets) -> Iterator[np.ndarray | None]:
        """Yield frames, each decoded from the last key frame before it, and None for others.

        Raises MissedFrame if a frame is missing from the key frame on. A decoder that starts after the key frame may
        yield wrong pixels.
        """
        assert packets.pts is not None
        with self.opened() as (container, stream):
            next_number, frames = 0, container.decode(stream)
            for number in numbers:
                key = int(packets.keys[np.searchsorted(packets.keys, number, "right") - 1])
                if key > next_number:
                    container.seek(int(packets.pts[key]), stream=stream, backward=True)
                    next_number, frames = key, container.decode(stream)
                yield from up_to(frames, packets.pts[next_number : number + 1].tolist())
                next_number = number + 1

    def in_sequence(self, numbers: Sequence[int]) -> Iterator[np.ndarray | None]:
        """Yield frames, decoded from the start of the file, and None for others."""
        packets, wanted = self.packets, set(numbers)
        at = None if packets.pts is None else {int(pts): number for number, pts in enumerate(packets.pts)}
        left = len(wanted)
        with self.opened() as (container, stream):
            for count, frame in enumerate(container.decode(stream)):
                is_wanted = (count if at is None else at.get(frame.pts)) in wanted
                yield upright(frame) if is_wanted else None
                left -= is_wanted
                if not left:
                    return
        raise ValueError(f"it ends before frame {numbers[-left]}: the file is damaged.")

    def opened(self) -> AbstractContextManager[tuple[Any, Any]]:
        """Open the file from its start."""
        self.file.seek(0)
        return open_container(Nameless(self.file), self.max_pixels)


def up_to(frames: Iterable[Any], pts: Sequence[int]) -> Iterator[np.ndarray | None]:
    """Yield None for each frame before the last of these times, then the frame at it.

    Raises MissedFrame if the frames from the first time on do not have these times.
    """
    place = 0
    for frame in frames:
        if frame.pts is None or (frame.pts != pts[place] and (place or frame.pts > pts[0])):
            break
        place += frame.pts == pts[place]
        if place == len(pts):
            yield upright(frame)
            return
        yield None
    raise MissedFrame


def num_decoded(numbers: Sequence[int], keys: np.ndarray) -> int:
    """Return how many frames are decoded if each number is read from the key frame before it, in one pass."""
    total, position = 0, -1
    for number in numbers:
        key = int(keys[np.searchsorted(keys, number, "right") - 1])
        total += number - max(key, position + 1) + 1
        position = number
    return total


def refuse_many(num_frames: int, limit: int) -> None:
    """Raise TooLong if more frames must be decoded than the limit allows."""
    if num_frames > limit:
        raise TooLong(
            f"{num_frames} frames would have to be decoded, over {DECODED_PER_FRAME} for each one that is taken: its "
            "key frames are too far apart, or it does not tell when frames are shown. Write it as mp4 with more key "
            "frames, or cut it."
        )


def upright(frame: Any) -> np.ndarray:
    """Return the pixels of a frame, turned as the file says. PyAV does not turn the videos of phones."""
    if frame.is_corrupt:
        raise ValueError(f"the frame at {frame.time} s is damaged.")
    pixels = frame.to_ndarray(format="rgb24")
    return np.rot90(pixels, round(frame.rotation / RIGHT_ANGLE) % 4)
