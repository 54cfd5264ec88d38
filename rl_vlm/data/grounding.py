"""ms-swift's column `objects`: names and boxes that replace marks in messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from rl_vlm.data.tables import Row
from rl_vlm.errors import DataError, shorten

Message = dict[str, Any]

MARKS = {"<ref-object>": "ref", "<bbox>": "bbox"}
"""Marks in messages, and the keys of `objects` that list their values."""
BOX_TYPES = (None, "real", "norm1")


def fill_objects(messages: Any, objects: Any, where: str) -> Any:
    """Replace the marks `<ref-object>` and `<bbox>` in messages by names and boxes, in order.

    A box becomes JSON text, `[x1, y1, x2, y2]`, with the numbers of the row: pixels of the image, or fractions of its
    size if `bbox_type` is `norm1`. Messages without marks are returned unchanged. `objects` may be JSON text. Raises
    DataError if the numbers of marks and values differ, or if a value is not text or not a box.
    """
    if not isinstance(messages, list):
        return messages
    content = [message.get("content") for message in messages if isinstance(message, dict)]
    if not any(mark in text for text in texts_in(content) for mark in MARKS):
        return messages
    objects = read_objects(objects, where)
    if objects.get("bbox_type") not in BOX_TYPES:
        raise DataError(f"{where}: objects.bbox_type is {objects['bbox_type']!r}; it should be real or norm1.")
    texts = {mark: written(objects.get(key) or [], key, where) for mark, key in MARKS.items()}
    for mark, values in texts.items():
        num_marks = sum(text.count(mark) for text in texts_in(content))
        if num_marks not in (0, len(values)):
            raise DataError(
                f"{where}: the messages have {num_marks} marks {mark} and objects.{MARKS[mark]} has {len(values)} "
                "values. Write one mark per value, or none."
            )
    left = {mark: iter(values) for mark, values in texts.items()}
    return [fill_message(message, lambda mark: next(left[mark[0]])) for message in messages]


def read_objects(objects: Any, where: str) -> Row:
    """Return `objects` as a dict, which is empty for None. Raises DataError if it is not an object."""
    found: Any = {} if objects is None else objects
    if isinstance(found, str):
        with suppress(ValueError):
            found = json.loads(found)
    if not isinstance(found, dict):
        raise DataError(
            f"{where}: found {shorten(repr(objects), 200)} for objects, expected an object with ref and bbox."
        )
    return found


def written(values: list[Any], key: str, where: str) -> list[str]:
    """Return names unchanged, and boxes as JSON text."""
    if key == "ref" and all(isinstance(value, str) for value in values):
        return values
    if key == "bbox" and all(map(is_box, values)):
        return [json.dumps(value) for value in values]
    expected = "names" if key == "ref" else "boxes [x1, y1, x2, y2] or points [x, y]"
    raise DataError(f"{where}: found {shorten(repr(values), 200)} for objects.{key}, expected a list of {expected}.")


def is_box(value: Any) -> bool:
    """Return whether a value is a list of 4 numbers (a box) or 2 numbers (a point)."""
    return isinstance(value, list) and len(value) in (2, 4) and all(isinstance(number, int | float) for number in value)


def texts_in(contents: list[Any]) -> Iterator[str]:
    """Yield all texts. Contents are strings or lists of blocks."""
    for content in contents:
        blocks = content if isinstance(content, list) else [{"text": content}]
        yield from (block["text"] for block in blocks if isinstance(block, dict) and isinstance(block.get("text"), str))


def fill_message(message: Any, value_of: Callable[[re.Match[str]], str]) -> Any:
    """Return the message with each mark replaced by its value."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, list):
        return message | {"content": [fill_text(block, "text", value_of) for block in content]}
    return fill_text(message, "content", value_of)


def fill_text(holder: Any, key: str, value_of: Callable[[re.Match[str]], str]) -> Any:
    """Return the dict with each mark in the text at `key` replaced by its value."""
    if not isinstance(holder, dict) or not isinstance(holder.get(key), str):
        return holder
    return holder | {key: re.sub("|".join(MARKS), value_of, holder[key])}
