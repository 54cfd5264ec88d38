"""Errors of images and videos, which name the row and the file, and values that look like images or videos."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rl_vlm.data.problems import PROBLEMS
from rl_vlm.errors import DataError, RLVLMError, TrainingError, is_of_machine, shorten

MediaKind = Literal["image", "video"]

BASE64 = re.compile(r"data:image/[^,\s]{1,99};base64,|(iVBORw0KGgo|/9j/|UklGR|R0lGOD)(?:(?:\r?\n)?[A-Za-z0-9+/]){100}")
"""The start of an image as base64 text: a data URL, or a bare PNG, JPEG, WEBP or GIF. The text may have line breaks."""


class AboveLimit(ValueError):
    """The image or video is larger or longer than a setting allows."""


@contextmanager
def media_errors(kind: MediaKind, value: Any, where: str) -> Iterator[None]:
    """Turn an error of the block into a DataError. Its message begins with `where` and the path of the file.

    Raises TrainingError for an error of the machine, such as a full disk, which must not count as a bad row.
    """
    try:
        yield
    except DataError as error:  # of a frame
        raise DataError(f"{where}{path_label(value)}: {error}", error.problem) from error
    except RLVLMError:  # such as a missing package
        raise
    except Exception as error:  # a damaged file can make a decoder raise anything
        what = f"{where}{path_label(value)}: the {kind} cannot be read: "
        if is_of_machine(error):
            raise TrainingError(f"{what}{shorten(error) or 'no memory is left'}. The file may be good.") from error
        missing, large, unreadable = PROBLEMS[kind]
        is_missing, is_large = isinstance(error, FileNotFoundError), isinstance(error, AboveLimit)
        problem = missing if is_missing else large if is_large else unreadable
        raise DataError(f"{what}{shorten(error) or type(error).__name__}", problem) from error


def path_label(value: Any) -> str:
    """Format the path of an image or video for an error message, or return "" if it has none."""
    while isinstance(value, dict):
        value = next((value[key] for key in ("path", "image", "video") if value.get(key) is not None), None)
    is_path = isinstance(value, Path) or (isinstance(value, str) and not BASE64.match(value))
    return f", {shorten(value, 120)}" if is_path else ""


def any_in(value: Any, is_one: Callable[[Any], bool]) -> bool:
    """Return whether a value, or one in a list, tuple or dict, passes a test."""
    match value:
        case list() | tuple():
            return any(any_in(each, is_one) for each in value)
        case dict():
            return any(any_in(each, is_one) for each in value.values())
    return is_one(value)


def ends_like(value: Any, suffix: re.Pattern[str]) -> bool:
    """Return whether a value is the path of a file with such a suffix."""
    text = str(value) if isinstance(value, str | Path) else ""
    return 0 < len(text) < 500 and "\n" not in text and bool(suffix.search(text))
