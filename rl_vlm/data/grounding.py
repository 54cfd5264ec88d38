"""ms-swift's column `objects`: names and boxes that replace marks in messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from rl_vlm.data.tables import TableRow
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
    found = list(texts_of(messages, "content"))
    num_marks = {mark: sum(text.count(mark) for text in found) for mark in MARKS}
    if not any(num_marks.values()):
        return messages
    objects = read_objects(objects, where)
    if objects.get("bbox_type") not in BOX_TYPES:
        raise DataError(f"{where}: objects.bbox_type is {objects['bbox_type']!r}; it should be real or norm1.")
    texts = {mark: written(objects.get(key) or [], key, where) for mark, key in MARKS.items()}
    for mark, values in texts.items():
        if num_marks[mark] not in (0, len(values)):
            raise DataError(
                f"{where}: the messages have {num_marks[mark]} marks {mark} and objects.{MARKS[mark]} has "
                f"{len(values)} values. Write one mark per value, or none."
            )
    left = {mark: iter(values) for mark, values in texts.items()}
    return map_texts(messages, lambda text: re.sub("|".join(MARKS), lambda mark: next(left[mark[0]]), text))


def read_objects(objects: Any, where: str) -> TableRow:
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


def texts_of(holders: list[Any], key: str) -> Iterator[str]:
    """Yield the texts under a key of the messages or blocks. Contents are texts or lists of blocks."""
    for holder in holders:
        value = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(value, list):
            yield from texts_of(value, "text")
        elif isinstance(value, str):
            yield value


def map_texts(messages: list[Any], change: Callable[[str], str]) -> list[Any]:
    """Return the messages with each text changed. Contents are texts or lists of blocks."""

    def changed(holder: Any, key: str) -> Any:
        value = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(value, list):
            return holder | {key: [changed(block, "text") for block in value]}
        return holder | {key: change(value)} if isinstance(value, str) else holder

    return [changed(message, "content") for message in messages]
