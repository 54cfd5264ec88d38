"""Video files, opened with PyAV. FFmpeg gets an open file and never a name, since it would open URLs and playlists."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from rl_vlm.data.video.source import Header, TooLong, too_large
from rl_vlm.data.video.timeline import Timeline, constant, timeline
from rl_vlm.errors import ConfigError

FORMATS = ("mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "mpegts")
"""Containers by FFmpeg's names. Playlists (HLS, DASH, concat) are not among them."""
SHOWN_FORMATS = "mp4, mov, mkv, webm, avi, mpegts, GIF, WEBP"
CODECS = (
    "h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg1video", "mpeg2video", "h263", "msmpeg4v3", "mjpeg", "prores",
    "theora",
)  # fmt: skip
DECODERS = (*CODECS, "libdav1d", "libvpx", "libvpx-vp9")
"""FFmpeg's decoders for `CODECS`."""
MOST_FRAMES = 1_000_000
"""Frames of a file, by its header. An hour of 240 frames per second has fewer."""
SLACK = 2
"""FFmpeg may get frames of this many times `data.max_image_pixels`, since it counts padding. It checks each frame."""
ENDS = 64
"""Packets at the start of a file that must have the times of its index."""
MISSING = 0.05
"""Fraction of a video that may be missing at the end of its file. Rates and durations in headers are not exact."""
RIGHT_ANGLE = 90


def load_av() -> Any:
    """Import PyAV. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ConfigError(
            "the data has video files, which are read with PyAV: pip install -e '.[video]'. Lists and folders of "
            "frames, arrays, GIF and WEBP are read without it."
        ) from error


class Packets(NamedTuple):
    """The compressed frames of a file, in the order in which they are shown."""

    pts: np.ndarray | None
    """Time of each frame in the stream's units, or None if decoded frames do not have it. They are counted then."""
    keys: np.ndarray
    """Numbers of the frames that are decoded without an earlier one."""
    timeline: Timeline


@contextmanager
def open_container(file: Any, max_pixels: int) -> Iterator[tuple[Any, Any]]:
    """Open a file that is at its start, and yield the container and its video stream.

    Raises ValueError if it is no video in one of `FORMATS` and `CODECS`, and for any other error of FFmpeg. System
    errors of the file itself pass.
    """
    av = load_av()
    options = {
        "format_whitelist": ",".join(FORMATS), "codec_whitelist": ",".join(DECODERS), "protocol_whitelist": "none",
    }  # fmt: skip
    try:
        container = av.open(file, mode="r", options=options)
    except av.error.ArgumentError as error:  # the format is not in the whitelist
        raise ValueError(f"its content is no video in one of the formats {SHOWN_FORMATS}.") from error
    except av.error.InvalidDataError as error:
        raise ValueError(
            f"its content is no video in one of the formats {SHOWN_FORMATS}, or its end is missing."
        ) from error
    except av.error.FFmpegError as error:
        raise ValueError(f"the file cannot be opened: {error}") from error
    with container:
        if not container.streams.video:
            kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
            raise ValueError(f"the file has no video stream, only {kinds}.")
        stream = container.streams.video[0]
        codec = stream.codec_context and stream.codec_context.codec.canonical_name
        if codec not in CODECS:
            raise ValueError(f"its codec is {codec}, which is not read. Convert it to one of {', '.join(CODECS)}.")
        stream.codec_context.options = {"max_pixels": str(SLACK * max_pixels)}
        stream.thread_type = "SLICE"  # threads of whole frames can hang if decoding ends before the file does
        try:
            yield container, stream
        except av.error.InvalidDataError as error:
            raise ValueError("the file is damaged: a part of it cannot be decoded.") from error
        except av.error.FFmpegError as error:  # it reports damage as a lack of memory, for example
            raise ValueError(f"the file is damaged: {error}") from error


def read_header(container: Any, stream: Any, max_pixels: int, file_size: int) -> Header:
    """Return size and length of a video from its header.

    Count the packets if it does not have the number of all frames. The header of a fragmented mp4 may have the number
    of those before the first fragment.

    Raises TooManyPixels for large frames, TooLong for too many of them, and ValueError if the end of the file is
    missing.
    """
    width, height = stream.codec_context.width, stream.codec_context.height
    if width < 1 or height < 1:
        raise ValueError("its header has no size.")
    too_large(width, height, max_pixels)
    length = stream_length(stream)
    if stream.frames > MOST_FRAMES:
        raise TooLong(f"its header has {stream.frames} frames, over {MOST_FRAMES}.")
    rate = float(stream.average_rate or 0)
    if length and rate and stream.frames >= (1 - MISSING) * length * rate:
        refuse_short(stream.index_entries, file_size)
        return Header(width, height, stream.frames, length)
    shown = read_packets(container, stream).timeline
    return Header(width, height, len(shown.ticks), shown.duration)


def refuse_short(index: Sequence[Any], file_size: int) -> None:
    """Raise ValueError if the index of a file has packets after its end, more than `MISSING` of all."""
    if not len(index):
        return
    last = index[math.ceil((1 - MISSING) * len(index)) - 1]
    if last.pos + last.size > file_size:
        raise ValueError(
            f"the file is truncated: it has {file_size} bytes, and its header has frames up to byte "
            f"{index[len(index) - 1].pos + index[len(index) - 1].size}."
        )


def stream_length(stream: Any) -> float | None:
    """Return the seconds of the video stream by its header, or None."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    tag = next((value for name, value in stream.metadata.items() if name.upper().startswith("DURATION")), None)
    try:
        hours, minutes, seconds = (tag or "").split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        return None


def read_packets(container: Any, stream: Any) -> Packets:
    """Read all packets without decoding one, and return the times of the frames.

    Raises ValueError if the packets end before the header says.
    """
    expected = stream_length(stream)
    whole = container.duration / 1e6 if container.duration else None  # of all streams, sound included
    base, pts, is_key, end, ends = stream.time_base, [], [], 0.0, []
    for packet in container.demux() if expected is None and whole else container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        start = packet.pts if packet.pts is not None else packet.dts
        if start is not None:
            ends.append(float((start + (packet.duration or 0)) * packet.time_base))
        if packet.stream_index == stream.index:
            pts.append(packet.pts)
            is_key.append(packet.is_keyframe)
    if not pts:
        raise ValueError("it has no frames.")
    first = float((container.start_time or 0) / 1e6) if expected is None else float((stream.start_time or 0) * base)
    end = max(ends, default=0.0) - first
    refuse_truncated(end, expected or whole, len(pts), stream.frames)
    if None in pts or len(set(pts)) < len(pts):
        rate = float(stream.average_rate or stream.guessed_rate)
        return Packets(None, np.array([0]), constant(len(pts), rate))
    if expected is not None:
        end = min(end, expected)  # an mp4's packets have the time to the next one that is decoded, not shown
    found = in_order(stream, np.array(pts, np.int64), np.array(is_key), first, end if expected or not whole else None)
    return found._replace(pts=None, keys=np.array([0])) if are_of_decoding(stream, pts) else found


def are_of_decoding(stream: Any, pts: Sequence[int]) -> bool:
    """Return whether the times of packets may be those at which they are decoded.

    A container such as AVI has no others, nor does a copy of its packets. They increase from packet to packet, also if
    the codec shows frames in another order.
    """
    return bool(stream.codec_context.has_b_frames and (np.diff(pts) > 0).all())


def indexed_packets(container: Any, stream: Any) -> Packets | None:
    """Return the packets as `read_packets` does, from the index alone. Return None if the index does not have them.

    The index of an mp4 has the times of decoding. If they are at even distances, so are the times at which frames are
    shown. The packets of both ends are read, and must have these times.
    """
    index, expected = stream.index_entries, stream_length(stream)
    if "mp4" not in container.format.name or expected is None or not ENDS < len(index) == stream.frames:
        return None
    entries = [(entry.timestamp, entry.is_keyframe, entry.is_discard) for entry in index]
    times, is_key, is_discarded = (np.array(column) for column in zip(*entries, strict=True))
    step = int(times[1] - times[0])
    if step <= 0 or (np.diff(times) != step).any() or is_discarded.any() or not is_key[0]:
        return None
    last_key = int(np.flatnonzero(is_key)[-1])
    head = [packet.pts for packet in islice(container.demux(stream), ENDS)]
    if None in head or are_of_decoding(stream, head):
        return None
    pts = min(head) + step * np.arange(len(index))
    container.seek(int(pts[last_key]), stream=stream, backward=True)
    tail = [packet for packet in container.demux(stream) if packet.size and packet.pts is not None]
    shown, expected_head = [packet.pts for packet in tail], pts[: ENDS // 2].tolist()
    if sorted(head)[: ENDS // 2] != expected_head or sorted(shown) != pts[last_key:].tolist():
        return None
    if shown[0] != pts[last_key]:  # frames after it in the file are shown before it
        return None
    first = float((stream.start_time or 0) * stream.time_base)
    end = max(float((packet.pts + (packet.duration or 0)) * stream.time_base) for packet in tail) - first
    refuse_truncated(end, expected, len(index), stream.frames)
    return in_order(stream, pts, is_key, first, end)


def in_order(stream: Any, pts: np.ndarray, is_key: np.ndarray, first: float, end: float | None) -> Packets:
    """Return packets in the order in which they are shown. The video starts and ends at these seconds.

    Raises ValueError if there is no key frame.
    """
    order = np.argsort(pts, kind="stable")
    shown, keys = pts[order], np.flatnonzero(is_key[order])
    if not len(keys):
        raise ValueError("it has no key frame, so that no frame can be decoded.")
    shown, keys, base = shown[keys[0] :], keys - keys[0], stream.time_base
    times = [float((each - shown[0]) * base) for each in shown.tolist()]
    length = max(0.0 if end is None else end - float((int(shown[0]) * base) - first), times[-1])
    length = length if length > times[-1] else times[-1] + mean_step(times)
    return Packets(shown, keys, timeline(times, length, float(stream.average_rate or 0) or None))


def mean_step(times: list[float]) -> float:
    """Return the mean time between frames, or a 25th of a second for one frame."""
    return times[-1] / (len(times) - 1) if len(times) > 1 else 1 / 25


def refuse_truncated(end: float, expected: float | None, num_packets: int, num_frames: int) -> None:
    """Raise ValueError if over `MISSING` of the length or of the number of frames in the header are not in the file."""
    if num_packets < (1 - MISSING) * num_frames:
        raise ValueError(f"the file is truncated: its header has {num_frames} frames, and it holds {num_packets}.")
    if expected is not None and end < (1 - MISSING) * expected:
        raise ValueError(f"the file is truncated: its header has {expected:.3g} s, and it ends at {end:.3g} s.")
