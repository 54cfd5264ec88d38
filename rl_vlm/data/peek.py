"""Reads the first rows of the data without the package `datasets`, which takes seconds to import."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rl_vlm.config.data_sources import is_file
from rl_vlm.config.schema import DataConfig
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.data.sources import as_rows, no_splits, open_source
from rl_vlm.data.tables import Row, Table
from rl_vlm.errors import DataError

if TYPE_CHECKING:
    import pyarrow

MAX_ROWS = 64


class NotOpened(Exception):
    """Only `datasets` can open the data. The message gives the reason."""


@dataclass(frozen=True)
class Peek:
    """Rows of a split. Of Parquet and Arrow files, only the first rows are read."""

    rows: Rows
    num_rows: int
    """Number of rows of the whole split."""

    @property
    def is_whole(self) -> bool:
        """Return whether these are all rows of the split."""
        return len(self.rows) == self.num_rows


def peek_rows(config: DataConfig, split: Literal["train", "eval"]) -> Peek:
    """Open the training or held-out data. Raises DataError like `load_rows`, and NotOpened for data on the hub."""
    counts: list[int] = []

    def open_quickly(name: str, part: str, subset: str | None, asked_by: str | None) -> tuple[Table, Path]:
        path = Path(name)
        if path.suffix == ".parquet" and asked_by is None:
            rows, count = parquet_rows(path)
        elif path.is_dir():
            rows, count = saved_rows(path, part, asked_by)
        elif is_file(name) or ":" in name:
            source, folder = open_source(name, part, subset, asked_by)
            counts.append(len(source))
            return source, folder
        else:
            refuse_missing_path(name)
            raise NotOpened(f"{name} is not here and is taken for a name on the hub")
        counts.append(count)
        return as_rows(rows, name), path if path.is_dir() else path.parent

    return Peek(load_rows(config, split, open_quickly), sum(counts))


def refuse_missing_path(name: str) -> None:
    """Raise DataError if a name can only be a path. Names on the hub are `name` or `owner/name`."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_file():
        kind = "is not a .parquet, .json or .jsonl file" if Path(name).exists() else "does not exist"
        raise DataError(f"{name} {kind}; name a file, a directory, a function or a hub name.")


def parquet_rows(path: Path) -> tuple[list[Row], int]:
    """Return the first rows and the total number of rows."""
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            first = next(file.iter_batches(batch_size=MAX_ROWS), None)
            return [] if first is None else first.to_pylist(), file.metadata.num_rows
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def saved_rows(path: Path, split: str, asked_by: str | None) -> tuple[list[Row], int]:
    """Return the first rows and the total number of rows in a directory written by `save_to_disk`."""
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise DataError(f"{path} has no split {split!r}; it has {', '.join(splits)}.")
        path = path / split
    elif asked_by is not None and (path / "state.json").is_file():
        raise no_splits(str(path), asked_by)
    if not (path / "state.json").is_file():
        raise NotOpened(f"{path} is a directory of files, whose splits `datasets` finds")
    files = [path / file["filename"] for file in json.loads((path / "state.json").read_text())["_data_files"]]
    tables = [arrow_table(file) for file in files]
    return tables[0].slice(0, MAX_ROWS).to_pylist(), sum(table.num_rows for table in tables)


def arrow_table(path: Path) -> pyarrow.Table:
    """Map an Arrow stream into memory. Raises DataError if it cannot be read."""
    import pyarrow

    try:
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
