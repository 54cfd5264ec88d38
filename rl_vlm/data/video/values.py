"""The value of a video in a row: a file, its bytes, frames, or a part of one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl_vlm.data.images import looks_like_image
from rl_vlm.data.media import any_in, ends_like
from rl_vlm.errors import DataError

KEYS = ("video", "bytes", "path")
"""Keys for the video in a dict. The first one that is filled counts."""
OWN_KEYS = {"fps": "fps", "start": "video_start", "end": "video_end"}
"""Keys for the fields of a `Clip`. `fps` is the rate of a list or folder of frames; a file has its own."""
SETTINGS = {
    "nframes": "num_frames", "num_frames": "num_frames", "min_frames": "min_frames",
    "max_frames": "max_frames", "min_pixels": "video_min_pixels", "max_pixels": "video_max_pixels",
    "total_pixels": "video_total_pixels", "resized_height": "video_max_pixels", "resized_width": "video_max_pixels",
}  # fmt: skip
"""Keys that Qwen's utilities read in a dict, and the setting that has this effect on all videos."""
CLIP_COLUMNS = (*OWN_KEYS.values(), *(key for key in SETTINGS if key != "num_frames"))
"""Columns that belong to the videos of their row, as keys of a dict do. `num_frames` often tells a file's length."""
VIDEO_SUFFIX = re.compile(r"\.(mp4|m4v|mov|mkv|webm|avi|mpe?g|3gp|ogv|wmv|flv)([?#]\S*)?\Z", re.IGNORECASE)


class Clip(NamedTuple):
    """The value of a video."""

    content: Any
    """A path, bytes, an open file, a list of frames, or an array."""
    fps: float | None = None
    """Frames per second of given frames."""
    start: float | None = None
    """Second of the file at which the clip starts, or None for the start of the file."""
    end: float | None = None
    """Second of the file at which the clip ends, or None for the end of the file."""

    @property
    def path(self) -> str | None:
        """Return the path of a file or folder, or None if the value is the video itself."""
        return str(self.content).removeprefix("file://") if isinstance(self.content, str | Path) else None


def video_clip(value: Any) -> Clip:
    """Return the video in a dict of `KEYS`, or the value itself if it is not a dict.

    Raises ValueError if a dict holds no video, or keys that would have no effect.
    """
    clip = Clip(value)
    while isinstance(clip.content, dict):
        given = {key: each for key, each in clip.content.items() if each is not None}
        filled = [given[key] for key in KEYS if key in given]
        if not filled:
            raise ValueError(f"found a dict of {', '.join(map(str, clip.content))}, expected one of {', '.join(KEYS)}.")
        own = {name: number(given, key) for name, key in OWN_KEYS.items() if key in given}
        if twice := [OWN_KEYS[name] for name in own if getattr(clip, name) not in (None, own[name])]:
            raise ValueError(
                f"{', '.join(twice)} of the video is given twice with different values: in the video's dict and in a "
                "column of the row."
            )
        clip = clip._replace(content=filled[0], **own)
        refuse_settings(given)
    return clip


def with_columns(videos: Sequence[tuple[str, Any]], row: Mapping[str, Any], where: str) -> list[tuple[str, Any]]:
    """Return the column and value of each video, with the values that the row has in `CLIP_COLUMNS`.

    A column has one value per video: a list if there are several videos. Raises DataError for another number.
    """
    given: dict[str, Sequence[Any]] = {}
    for name in CLIP_COLUMNS if videos else ():
        if row.get(name) is not None:
            given[name] = row[name] if isinstance(row[name], list | tuple) else [row[name]]
            if len(given[name]) != len(videos):
                raise DataError(
                    f"{where}: column {name} has {len(given[name])} values, and the row has {len(videos)} videos. Give "
                    "one value per video, in a list, or leave the column out with data.ignore_columns."
                )
    if not given:
        return list(videos)
    columns = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
    return [(name, {"video": value} | own) for (name, value), own in zip(videos, columns, strict=True)]


def refuse_settings(given: dict[str, Any]) -> None:
    """Raise ValueError for keys of a dict that would have no effect."""
    if ignored := [key for key in SETTINGS if key in given]:
        settings = ", ".join(dict.fromkeys(f"data.{SETTINGS[key]}" for key in ignored))
        raise ValueError(
            f"{', '.join(ignored)} beside the video would have no effect; set {settings}. Leave a column out with "
            "data.ignore_columns."
        )


def number(given: dict[str, Any], key: str) -> float:
    """Return a value as a number of seconds or of frames per second. Raises ValueError if it is none."""
    value = given[key]
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf") or (key == "fps" and value == 0):
        raise ValueError(f"{key} of the video is {value!r}, expected a number.")
    return float(value)


def looks_like_video(value: Any) -> bool:
    """Return whether a value seems to be a video file, or a list, tuple or dict with one."""
    return any_in(value, is_video_like)


def is_video_like(value: Any) -> bool:
    """Return whether a value seems to be a video file or an array of frames."""
    if isinstance(value, np.ndarray):
        return value.ndim == 4 and value.dtype == np.uint8
    return ends_like(value, VIDEO_SUFFIX)


def is_frame_list(values: Any) -> bool:
    """Return whether a list holds the frames of one video, rather than videos."""
    return isinstance(values, list | tuple) and all(
        looks_like_image(value) and not isinstance(value, list | tuple) and not has_video(value) for value in values
    )


def has_video(value: Any) -> bool:
    """Return whether a value is a dict with a video."""
    return isinstance(value, dict) and value.get("video") is not None


def paths_in(value: Any) -> Any:
    """Return the paths in a video's value, with the interval of a clip. Bytes and pixels become None."""
    if isinstance(value, dict):
        return {str(key): paths_in(each) for key, each in value.items() if key != "bytes"}
    if isinstance(value, list | tuple):
        return list(map(paths_in, value))
    return str(value) if isinstance(value, str | Path) else value if isinstance(value, int | float) else None


def absolute_video(value: Any, folder: Path) -> Any:
    """Return a video's value with absolute paths of its files."""
    if isinstance(value, dict):
        held = ("video", "image", "path")
        return {key: absolute_video(each, folder) if key in held else each for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [absolute_video(each, folder) for each in value]
    path = Clip(value).path
    return value if path is None else str((folder / path).absolute())
