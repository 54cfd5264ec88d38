"""Sources of rows: files, directories, the hub and functions. A row is decoded when it is read."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rl_vlm.errors import DataError
from rl_vlm.functions import LoadError, load_function

Row = dict[str, Any]
IMAGE_COLUMNS = ("image", "images")


def open_source(name: str, split: str, subset: str | None, asked_by: str | None = None) -> tuple[Sequence[Row], Path]:
    """Open the rows of `name`. Also returns the folder of their relative image paths.

    `name` is a .json, .jsonl or .parquet file, a directory, `file.py:function`, `module:function`, or a hub name.
    `split` selects a split if the source has several; a file, or a function that returns rows, has one. `asked_by` is
    the setting that asks for it, or None if it is the default.
    Raises DataError if the source cannot be read, or has no splits to choose from.
    """
    path = Path(name)
    if path.suffix in (".json", ".jsonl"):
        return read_json(path), path.parent
    if path.suffix == ".parquet":
        return load_with_datasets("parquet", None, "train", data_files=name), path.parent
    if path.is_dir():
        return open_directory(path, split, subset, asked_by), path
    if ":" in name:
        try:
            function = load_function(name)
        except LoadError as error:
            raise DataError(f"Dataset {name!r}: {error}") from error
        return choose_split(function(), name, split, asked_by), Path()
    return load_with_datasets(name, subset, split), Path()


def read_json(path: Path) -> list[Row]:
    """Read the rows of a list of objects (.json), or of one object per line (.jsonl)."""
    try:
        with path.open(encoding="utf-8") as file:
            rows = json.load(file) if path.suffix == ".json" else read_lines(file, path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return check_rows(rows, str(path))


def read_lines(lines: Iterable[str], path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from error
    return rows


def open_directory(path: Path, split: str, subset: str | None, asked_by: str | None) -> Sequence[Row]:
    """Open a directory written by `save_to_disk`, or a directory of data files."""
    import datasets

    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return choose_split(datasets.load_from_disk(path), str(path), split, asked_by)
    return load_with_datasets(str(path), subset, split)


def load_with_datasets(path: str, subset: str | None, split: str, data_files: str | None = None) -> Sequence[Row]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name = data_files or path
    try:
        dataset = load_dataset(path, subset, split=split, data_files=data_files)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(f"Dataset {name!r}, split {split!r}, cannot be loaded: {error}") from error
    return ArrowRows(dataset, name)


def choose_split(data: Any, name: str, split: str, asked_by: str | None) -> Sequence[Row]:
    """Return the rows of a list, of a Dataset, or of `split` in a dict of either."""
    if isinstance(data, dict):
        if split not in data:
            raise DataError(f"{name} has no split {split!r}; it has {', '.join(data)}.")
        data = data[split]
    elif asked_by is not None:
        raise DataError(f"{name} has no splits, so data.{asked_by} {split!r} has no effect; leave it out.")
    return check_rows(data, name) if isinstance(data, list) else ArrowRows(data, name)


def check_rows(rows: Any, name: str) -> list[Row]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{name}: expected a list of objects, one per row (in a .jsonl file: one object per line).")
    return rows


class ArrowRows(Sequence[Row]):
    """A `datasets.Dataset` read row by row. Image columns are not decoded: they hold bytes or a path."""

    def __init__(self, dataset: Any, name: str) -> None:
        import datasets

        if not isinstance(dataset, datasets.Dataset):
            raise DataError(f"{name} gives a {type(dataset).__name__}; expected a datasets.Dataset or a list of dicts.")
        if dataset.format["type"] == "custom":
            raise DataError(f"{name} has a transform, which would be left out; apply it with `map`, or return a list.")
        self.tables: Any = dataset.with_format("arrow")
        self.features = datasets.Features(copy.deepcopy(dict(dataset.features)))
        for column in self.features.keys() & set(IMAGE_COLUMNS):
            feature = self.features[column]
            item = getattr(feature, "feature", feature)
            if isinstance(item, datasets.Image):
                item.decode = False
                self.features[column] = feature  # setting the column updates what Features decodes

    def __len__(self) -> int:
        return len(self.tables)

    def __getitem__(self, index: int) -> Row:
        return self.features.decode_example(self.tables[index].to_pylist()[0])


def unique_ids(source: Sequence[Row], name: str) -> list[str]:
    """Return column `id` as text, or the row's index if it has no id.

    Raises DataError if an id occurs twice, because both rows would use the same random numbers.
    """
    if not isinstance(source, ArrowRows):
        given = [row.get("id") for row in source]
    elif "id" in source.features:
        given = source.tables.select_columns("id")[:]["id"].to_pylist()
    else:
        given = [None] * len(source)
    ids = [str(index if value is None else value) for index, value in enumerate(given)]
    first_rows: dict[str, int] = {}
    for index, sample_id in enumerate(ids):
        if (first := first_rows.setdefault(sample_id, index)) != index:
            raise DataError(
                f"{name}: rows {first} and {index} have the same id {sample_id!r}, so they would share random numbers "
                "and count as one sample. Make column `id` unique, or rename it."
            )
    return ids
