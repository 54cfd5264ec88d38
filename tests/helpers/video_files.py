"""Small video files, written with PyAV on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

CODECS = {".mp4": "h264", ".mov": "h264", ".mkv": "h264", ".ts": "h264", ".avi": "mpeg4", ".webm": "libvpx-vp9"}


def moving_frames(num_frames: int, width: int = 64, height: int = 48) -> np.ndarray:
    """Return frames of coloured squares that move to the right by three pixels a frame."""
    colours = np.random.default_rng(0).integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
    squares = colours.repeat(8, axis=0).repeat(8, axis=1)
    return np.stack([np.roll(squares, 3 * number, axis=1) for number in range(num_frames)])


def write_video(
    path: Path, frames: np.ndarray, rate: int = 25, key_every: int = 10, milliseconds: Sequence[int] | None = None,
    codec: str | None = None, rotation: int | None = None, options: dict[str, str] | None = None,
    b_frames: int | None = None,
) -> Path:  # fmt: skip
    """Write frames to a file whose suffix names the container. `milliseconds` are their times without a constant rate.

    `rotation` is the angle in degrees, against the clock, by which players turn the video. `b_frames` is
    the largest number of frames in a row that refer to a later one, by default the codec's.
    """
    with av.open(str(path), "w", options=options or {}) as container:
        stream: Any = container.add_stream(codec or CODECS[path.suffix], rate=rate)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.codec_context.gop_size = key_every
        if CODECS.get(path.suffix) == "h264":
            stream.options = {"sc_threshold": "0"}  # no key frames at cuts
        if b_frames is not None:
            stream.codec_context.max_b_frames = b_frames
        if rotation is not None:
            stream.set_display_rotation(rotation)
        if milliseconds is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if milliseconds is not None:
                frame.pts, frame.time_base = milliseconds[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def copy_packets(source: Path, path: Path) -> Path:
    """Write the packets of a file to another container, with the times that FFmpeg gives them."""
    with av.open(str(source)) as read, av.open(str(path), "w") as written:
        stream = read.streams.video[0]
        copied = written.add_stream_from_template(stream)
        for packet in read.demux(stream):
            if packet.size:
                packet.stream = copied
                written.mux(packet)
    return path


def write_sound(path: Path) -> Path:
    """Write a file with sound alone."""
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path
