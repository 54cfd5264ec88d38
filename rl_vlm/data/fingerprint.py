"""A fingerprint of the training rows, by which a resumed run notices that its data has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

from rl_vlm.data.images import image_path
from rl_vlm.data.samples import Rows
from rl_vlm.data.sources import IMAGE_COLUMNS, ArrowRows, Row

BATCH = 1000


def data_fingerprint(rows: Rows, row_indices: Sequence[int]) -> str:
    """Return the number of rows in use and a digest of their contents. Of images, the paths count."""
    used, digest = set(row_indices), hashlib.sha256()
    for index, row in enumerate(texts(rows.source)):
        if index in used:
            content = [rows.sample_ids[index], row]
            digest.update(json.dumps(content, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return f"{len(row_indices)} rows, {digest.hexdigest()[:16]}"


def texts(source: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows without the pixels and bytes of images, which are not read."""
    if isinstance(source, ArrowRows):
        columns = [name for name in source.features if name not in IMAGE_COLUMNS]
        for batch in source.tables.select_columns(columns).iter(BATCH):
            yield from batch.to_pylist()
        return
    for row in source:
        images = {name: row[name] for name in IMAGE_COLUMNS if name in row}
        paths = {name: paths_of(value) for name, value in images.items()}
        yield {str(name): value for name, value in row.items() if name not in IMAGE_COLUMNS} | paths


def paths_of(images: object) -> list[str | None]:
    """Return the path of each image, or None for an image without one."""
    values = images if isinstance(images, list) else [images]
    return [None if path is None else str(path) for path in map(image_path, values)]
