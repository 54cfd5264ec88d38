"""Videos that cannot be used, one of each kind, and the reason of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.video_files import moving_frames, write_sound, write_video

NO_VIDEO = "its content is no video in one of the formats mp4, mov"


def bad_videos(folder: Path) -> dict[str, tuple[Any, str]]:
    """Write a bad video of each kind to a folder. Returns its value in a row, and a pattern of the reason, by kind."""
    frames = moving_frames(50)
    mp4, webm, mkv = (write_video(folder / f"good.{kind}", frames).read_bytes() for kind in ("mp4", "webm", "mkv"))
    gif_start = b"GIF89a" + (2000).to_bytes(2, "little") * 2 + bytes.fromhex("800000 000000 ffffff")
    gif_frame = bytes.fromhex("21f904000a000000 2c0000000001000100000202440100")  # one pixel of the screen changes
    front = write_video(folder / "front.mp4", frames, options={"movflags": "faststart"}).read_bytes()
    third = len(mp4) // 3
    contents = {
        "half.mp4": mp4[: len(mp4) // 2], "half_front.mp4": front[: len(front) // 2],
        "half.webm": webm[: len(webm) // 2], "half.mkv": mkv[: len(mkv) // 2],
        "damaged.mp4": mp4[:third] + bytes([90]) * 200 + mp4[third + 200 :], "empty.mp4": b"",
        "large.gif": gif_start + gif_frame * 251 + b";",
        "text.mp4": b"not a video", "concat.mp4": b"ffconcat version 1.0\nfile good.mp4\n",
        "list.mp4": b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    Image.new("RGB", (8, 8)).save(folder / "image.mp4", "PNG")
    Image.new("RGB", (8, 8)).save(folder / "still.gif")
    Image.new("RGB", (6, 8)).save(folder / "turned.png")
    Image.new("RGB", (8, 6)).save(folder / "upright.png")
    write_sound(folder / "sound.mp4")
    write_video(folder / "lossless.mkv", frames[:5], codec="ffv1")
    write_video(folder / "long.mp4", frames[:2], milliseconds=[0, 4_000_000])
    os.mkfifo(folder / "fifo.mp4")
    (folder / "folder").mkdir()
    short = f"truncated: it has {len(front) // 2} bytes, and its header has frames up to byte {len(front)}\\."
    return {
        "truncated mp4": ("half.mp4", "or its end is missing"),
        "truncated mp4, header in front": ("half_front.mp4", short),
        "truncated webm": ("half.webm", "the file is truncated: its header has 2 s, and it ends at 0"),
        "truncated mkv": ("half.mkv", "the file is truncated: its header has 2 s, and it ends at"),
        "damaged inside": ("damaged.mp4", "the file is damaged"), "empty": ("empty.mp4", "the file is empty"),
        "text": ("text.mp4", NO_VIDEO), "playlist": ("list.mp4", "it is a playlist"),
        "list of files": ("concat.mp4", "it is a playlist"),
        "image": ("image.mp4", r"it is an image \(PNG\), not a video"),
        "GIF of one frame": ("still.gif", r"it is an image \(GIF\) of one frame"),
        "GIF of many pixels": ("large.gif", r"its 251 frames of 2000 × 2000 pixels have more than 1000000000 pixels"),
        "sound alone": ("sound.mp4", "no video stream, only audio"),
        "codec": ("lossless.mkv", "its codec is ffv1, which is not read"),
        "too long": ("long.mp4", r"4\d* s .* data.max_video_seconds = 3600"),
        "FIFO": ("fifo.mp4", "is a FIFO; only regular files are read"), "empty folder": ("folder", "has no images"),
        "URL": ("http://a/b.mp4", "URLs are not fetched"), "another protocol": ("concat:good.mp4", "No such file"),
        "missing": ("none.mp4", "No such file"), "number": (7, "found a int, expected a path"),
        "frames of unequal sizes": (["upright.png", "turned.png"], "frame 1 has 6 × 8 pixels, and the first has 8 × 6"),
        "part outside": ({"video": "good.mp4", "video_start": 3.0}, "video, which has 2 s"),
    }  # fmt: skip


def write_huge_video(path: Path) -> Path:
    """Write a video of one frame with more pixels than the default of `data.max_image_pixels`."""
    return write_video(path, np.zeros((1, 4400, 8000, 3), np.uint8))
