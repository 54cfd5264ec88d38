"""Sources of rows: files, directories, the hub and functions. A row is decoded when it is read."""

from __future__ import annotations

import codecs
from contextlib import chdir
from pathlib import Path
from typing import Any

from rl_vlm.config import json_text
from rl_vlm.config.data_sources import is_file
from rl_vlm.data.mixture import MixedRows
from rl_vlm.data.tables import ArrowRows, ListRows, Table
from rl_vlm.errors import DataError, RLVLMError, text_of
from rl_vlm.functions import LoadError, load_function

Source = Table | MixedRows


def open_source(name: str, split: str, subset: str | None, asked_by: str | None = None) -> tuple[Table, Path]:
    """Open the rows of `name`. Also returns the folder of their relative image paths.

    `name` is a .json, .jsonl or .parquet file, a directory, `file.py:function`, `module:function`, or a hub name.
    `split` selects a split if the source has several. A file, or a function that returns rows, has only one. `asked_by`
    names the setting that asks for the split, or is None if the split is the default.
    Raises DataError if the source cannot be read, or has no splits to choose from.
    """
    path = Path(name)
    if asked_by is not None and is_file(name):
        raise no_splits(name, asked_by)
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
        try:
            with chdir("."):  # the function may change the working directory
                data = function()
        except (RLVLMError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise DataError(
                f"Dataset {name!r}: the function raised {type(error).__name__}: {text_of(error)}"
            ) from error
        return choose_split(data, name, split, asked_by), Path()
    return load_with_datasets(name, subset, split), Path()


def read_json(path: Path) -> ListRows:
    """Read rows from a list of objects (.json), or from one object per line (.jsonl), in UTF-8 with or without BOM."""
    try:
        if path.suffix == ".json":
            return as_rows(parse_json(path.read_bytes(), str(path)), str(path))
        with path.open("rb") as file:
            lines = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return as_rows(lines, str(path))


def parse_json(content: bytes, where: str) -> Any:
    """Parse UTF-8 JSON, with or without BOM.

    Raises DataError with a message that begins with `where`. If a byte is not UTF-8, the message names its line.
    """
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return json_text.parse(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start)
        place = f"{where}, line {line + 1}" if line else where
        raise DataError(
            f"{place}: not UTF-8: found byte 0x{content[error.start]:02x} after "
            f"{content[: error.start].decode('utf-8')[-30:]!r}. Save the file in UTF-8."
        ) from error
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{where}: its lists and objects are nested too deeply to be read.") from error


def open_directory(path: Path, split: str, subset: str | None, asked_by: str | None) -> Table:
    """Open a directory written by `save_to_disk`, or a directory of data files."""
    import datasets

    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return choose_split(datasets.load_from_disk(path), str(path), split, asked_by)
    return load_with_datasets(str(path), subset, split)


def load_with_datasets(path: str, subset: str | None, split: str, data_files: str | None = None) -> Table:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name = data_files or path
    try:
        dataset = load_dataset(path, subset, split=split, data_files=data_files)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(f"Dataset {name!r}, split {split!r}, cannot be loaded: {error}") from error
    return ArrowRows(dataset, name)


def no_splits(name: str, asked_by: str) -> DataError:
    """Build the error for a split of data that has no splits. `asked_by` names the setting that asks for it."""
    return DataError(f"{name} has no splits, so {asked_by} has no effect; leave it out.")


def choose_split(data: Any, name: str, split: str, asked_by: str | None) -> Table:
    """Return the rows of a list or a Dataset, or of `split` if `data` is a dict of splits."""
    if isinstance(data, dict):
        if split not in data:
            raise DataError(f"{name} has no split {split!r}; it has {', '.join(data)}.")
        data = data[split]
    elif asked_by is not None:
        raise no_splits(name, asked_by)
    return as_rows(data, name) if isinstance(data, list) else ArrowRows(data, name)


def as_rows(rows: Any, name: str) -> ListRows:
    """Convert a list of dicts to rows. Raises DataError for anything else."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{name}: expected a list of objects, one per row (in a .jsonl file: one object per line).")
    return ListRows(rows)


def unique_ids(source: Table, name: str) -> list[str]:
    """Return each row's `id` as text, or its index if it has no id.

    Raises DataError if an id occurs twice, because both rows would use the same random numbers.
    """
    given = source.values("id") if "id" in source.columns else [None] * len(source)
    ids = [str(index if value is None else value) for index, value in enumerate(given)]
    first_rows: dict[str, int] = {}
    for index, sample_id in enumerate(ids):
        if (first := first_rows.setdefault(sample_id, index)) != index:
            raise DataError(
                f"{name}: rows {first} and {index} have the same id {sample_id!r}, so they would share random numbers "
                "and count as one sample. Make column `id` unique, or leave it out with data.ignore_columns: [id]."
            )
    return ids
