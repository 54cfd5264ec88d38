"""Parses boxes and points in an answer. Completions and gold answers go through the same parser.

The first of these forms that a text has is read:

- Qwen2-VL and InternVL: `<|box_start|>(x1,y1),(x2,y2)<|box_end|>` and `<box>[[x1, y1, x2, y2], ...]</box>`, with the
  label before it in `<|object_ref_start|>` or `<ref>` tags;
- Qwen2.5-VL and Qwen3-VL, and any other JSON: `{"bbox_2d": [x1, y1, x2, y2], "label": "dog"}`, `[x1, y1, x2, y2]`,
  `{"x1": ..., "y1": ..., "x2": ..., "y2": ...}`, points as `{"point_2d": [x, y]}` or `[x, y]`, and lists of all these;
- the first form without its special tokens: `(x1,y1),(x2,y2)`;
- four numbers and nothing else: `x1, y1, x2, y2` and `(x1, y1, x2, y2)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from rewards.contract import plain
from rewards.forms import LARGEST_COORDINATE

MOST_REGIONS = 1000
"""An answer with more boxes and points than this counts as unreadable."""
SMALLEST_SIDE = 1e-9
"""Smallest side of a box, so that no area is 0."""
LONGEST_REPAIR = 1000
"""Maximum characters of damaged JSON in a completion to repair. The time can grow with the cube of their number."""
LONGEST_GOLD_REPAIR = 100_000
DEEPEST_LIST = 4

REGION_KEYS = ("bbox_2d", "bbox", "box", "bounding_box", "point_2d", "point", "coordinate")
CORNER_KEYS = (("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax"), ("x", "y"))
LABEL_KEYS = ("label", "name", "category", "category_id", "labels", "categories")
CONFIDENCE_KEYS = ("score", "confidence")

# The quantifiers are bounded or stop at `<`, so every text takes linear time.
TAGGED = re.compile(
    r"(?:<\|object_ref_start\|>|<ref>)(?P<label>[^<]*)(?:<\|object_ref_end\|>|</ref>)"
    r"|(?:<\|box_start\|>|<box>)(?P<box>[^<]*)(?:<\|box_end\|>|</box>)"
)
NUMBER = r"\s?([-+]?[0-9]{1,12}(?:\.[0-9]{0,20})?)\s?"
PAIRS = re.compile(rf"\({NUMBER},{NUMBER}\)(?:\s?,\s?\({NUMBER},{NUMBER}\))?")
FOUR = re.compile(rf"\(?{NUMBER},{NUMBER},{NUMBER},{NUMBER}\)?\.?")
BRACKET = re.compile(r"[\[{]")
DECODER = json.JSONDecoder(parse_int=float)


class Region(NamedTuple):
    """A box or a point of an answer."""

    numbers: tuple[float, ...] | None
    """(x1, y1, x2, y2) of a box with x1 < x2 and y1 < y2, or (x, y) of a point. None if it is neither."""
    label: str | None = None
    """The label in lower case, or None if there is none."""
    confidence: float | None = None

    @property
    def is_box(self) -> bool:
        return self.numbers is not None and len(self.numbers) == 4


def read_text(text: str, longest_repair: int = LONGEST_REPAIR) -> list[Region] | None:
    """Return the boxes and points in an answer's text, or None if it has none, or more than `MOST_REGIONS`.

    The list is empty if the answer says so, for example with `[]`.
    """
    if "<|box_start|>" in text or "<box>" in text:
        return _bounded(_of_tags(text)) or None
    regions = _of_text(text, longest_repair)
    return None if regions is None else _bounded(regions)


def read_object(value: Any) -> list[Region] | None:
    """Return the boxes and points in a list, mapping or array, or None if there are more than `MOST_REGIONS`."""
    return _bounded(_regions(value))


def _bounded(regions: Iterable[Region]) -> list[Region] | None:
    found = list(islice(regions, MOST_REGIONS + 1))
    return found if len(found) <= MOST_REGIONS else None


def _of_tags(text: str) -> Iterator[Region]:
    """Yield the boxes in the tags of a text, each with the last label before it. Damaged JSON is not repaired."""
    label = None
    for tag in TAGGED.finditer(text):
        if tag["label"] is not None:
            label = _label(tag["label"]) or None
        else:
            yield from (region._replace(label=label) for region in _of_text(tag["box"], 0) or [Region(None)])


def _of_text(text: str, longest_repair: int) -> Iterator[Region] | None:
    """Return the regions in a text's JSON or pairs of numbers, or None if it has neither."""
    values = _json_values(text, longest_repair)
    if values:
        return (region for value in values for region in _regions(value))
    if four := FOUR.fullmatch(text.strip()):
        return iter([_region([float(number) for number in four.groups()])])
    if not PAIRS.search(text) or BRACKET.search(text):
        return None
    return (_region([float(number) for number in pairs.groups() if number]) for pairs in PAIRS.finditer(text))


def _json_values(text: str, longest_repair: int) -> list[Any]:
    """Return every JSON list and object in a text. If JSON is damaged, the rest of the text is repaired."""
    values, bracket = [], BRACKET.search(text)
    while bracket:
        try:
            value, end = DECODER.raw_decode(text, bracket.start())
        except (ValueError, RecursionError):
            return values + _repaired(text[bracket.start() :], longest_repair)
        values.append(value)
        bracket = BRACKET.search(text, end)
    return values


def _repaired(text: str, longest_repair: int) -> list[Any]:
    import json_repair

    if len(text) > longest_repair:
        return []
    try:
        value = json_repair.loads(text, skip_json_loads=True)
    except (ValueError, RecursionError):
        return []
    return [value] if isinstance(value, list | dict) else []


def _regions(value: Any, depth: int = 0) -> Iterator[Region]:
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy arrays and tensors
    if isinstance(value, Mapping):
        yield from _of_mapping(value, depth)
    elif isinstance(value, list | tuple) and depth <= DEEPEST_LIST:
        if value and all(not isinstance(item, list | tuple | Mapping) and not _is_array(item) for item in value):
            yield _region(value)
        else:
            for item in value:
                yield from _regions(item, depth + 1)
    else:
        yield Region(None)


def _is_array(value: Any) -> bool:
    return getattr(value, "ndim", 0) > 0


def _of_mapping(value: Mapping[Any, Any], depth: int) -> Iterator[Region]:
    """Yield the boxes or points in an object, with label and confidence.

    A list of labels must have one label per region. If the number differs, or if a label is invalid, regions become
    invalid. They do also if `bbox_format` is not xyxy.
    """
    given: Any = next((value[key] for key in LABEL_KEYS if key in value), None)
    confidence = next((_number(value[key]) for key in CONFIDENCE_KEYS if key in value), None)
    regions = list(islice(_held(value, depth), MOST_REGIONS + 1))
    given = given.tolist() if hasattr(given, "tolist") else given  # numpy arrays
    labels = [_label(each) for each in (given if isinstance(given, list | tuple) else [given] * len(regions))]
    if len(labels) != len(regions) or None in labels or value.get("bbox_format", "xyxy") != "xyxy":
        yield Region(None)
        return
    for region, label in zip(regions, labels, strict=True):
        yield Region(region.numbers, label or None, confidence)


def _held(value: Mapping[Any, Any], depth: int) -> Iterator[Region]:
    """Yield the boxes or points in an object."""
    for key in REGION_KEYS:
        if key in value and depth <= DEEPEST_LIST:
            yield from _regions(value[key], depth + 1)
            return
    corners = next((keys for keys in CORNER_KEYS if all(key in value for key in keys)), ())
    yield _region([value[key] for key in corners])


def _region(values: Sequence[Any]) -> Region:
    numbers = [number for number in map(_number, values[:4]) if number is not None]
    if len(numbers) != len(values) or len(numbers) not in (2, 4):
        return Region(None)
    sides = [end - start for start, end in zip(numbers[:2], numbers[2:], strict=False)]
    return Region(tuple(numbers) if all(side >= SMALLEST_SIDE for side in sides) else None)


def _number(value: Any) -> float | None:
    """Return a number up to `LARGEST_COORDINATE` as a float, or None for anything else."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST_COORDINATE else None  # false for nan


def _label(value: Any) -> str | None:
    """Return a label for comparison, "" if there is none, or None if the value is not a label. Numbers are labels."""
    if value is None:
        return ""
    if (number := _number(value)) is not None:
        return str(int(number)) if number.is_integer() else repr(number)
    return " ".join(value.casefold().split()) if isinstance(value, str) else None
