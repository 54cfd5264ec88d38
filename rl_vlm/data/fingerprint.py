"""Fingerprints of rows. They let a resumed run notice that its data has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from rl_vlm.data.images import image_path
from rl_vlm.data.samples import Rows
from rl_vlm.data.tables import IMAGE_COLUMNS, VIDEO_COLUMNS, Table, TableRow
from rl_vlm.data.video.values import paths_in


def data_fingerprint(rows: Rows, row_indices: Sequence[int]) -> str:
    """Return the number of rows in use and a digest of their contents. Images and videos count by their paths."""
    used, digest = set(row_indices), hashlib.sha256()
    batches = rows.source.batches(range(len(rows)), rows.source.columns)
    for index, row in enumerate(row for batch in batches for row in batch):
        if index in used:
            digest.update(as_json([rows.sample_ids[index], comparable(row)]).encode())
    return f"{len(row_indices)} rows, {digest.hexdigest()[:16]}"


def contents(table: Table) -> str:
    """Return a digest of the contents of all rows. Images and videos count by their paths."""
    digest = hashlib.sha256()
    for batch in table.batches(range(len(table)), table.columns):
        for row in batch:
            digest.update(as_json(comparable(row)).encode())
    return digest.hexdigest()


def comparable(row: TableRow) -> Any:
    """Return the row in the form that enters a digest."""
    return with_text_keys(without_pixels(row))


def as_json(content: Any) -> str:
    """Convert to JSON. A value without a JSON form is represented by its type."""
    return json.dumps(content, sort_keys=True, default=lambda value: type(value).__name__)


def without_pixels(row: TableRow) -> TableRow:
    """Return the row with images and videos replaced by their paths. None is read."""
    replaced = dict.fromkeys(IMAGE_COLUMNS, paths_of) | dict.fromkeys(VIDEO_COLUMNS, paths_in)
    return {str(name): replaced[name](value) if name in replaced else value for name, value in row.items()}


def with_text_keys(value: Any) -> Any:
    """Convert all dict keys to text, since keys of several types cannot be sorted."""
    if isinstance(value, dict):
        return {str(key): with_text_keys(item) for key, item in value.items()}
    return list(map(with_text_keys, value)) if isinstance(value, list | tuple) else value


def paths_of(images: Any) -> list[str | None]:
    """Return the path of each image, or None for an image without one."""
    values = images if isinstance(images, list) else [images]
    return [None if path is None else str(path) for path in map(image_path, values)]
