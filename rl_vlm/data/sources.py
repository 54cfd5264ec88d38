"""Sources of rows: files, directories, functions and the hub. A row is decoded when it is read.

`open_source` is the only reader. A dry run reads the first rows with it, which spares the import of `datasets`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_vlm.config import json_text
from rl_vlm.config.data_names import is_file, num_draws
from rl_vlm.data.tables import ArrowRows, ListRows
from rl_vlm.errors import DataError, RLVLMError, text_of
from rl_vlm.functions import LoadError, load_function

if TYPE_CHECKING:
    import pyarrow


class NotOpened(Exception):
    """Only `datasets` can open the data. The message gives the reason."""


class Opened(NamedTuple):
    """An open source."""

    rows: ListRows | ArrowRows
    image_folder: Path = Path()
    """Folder of relative image paths."""
    num_unread: int = 0
    """Number of rows after the first ones, if only these are read."""


def open_source(
    name: str, split: str, subset: str | None, asked_by: str | None = None, max_rows: int | None = None
) -> Opened:
    """Open the rows of `name`: a .json, .jsonl or .parquet file, a directory, a function, a hub name, or `draws:N`.

    `split` selects a split if the source has several. A file, or a function that returns rows, has only one. `asked_by`
    names the setting that asks for the split, or is None if the split is the default. With `max_rows`, the package
    `datasets` is not imported if it can be avoided, and only the first rows of Parquet and Arrow files are read.
    Raises DataError if the source cannot be read, or has no splits to choose from, and NotOpened with `max_rows` if
    only `datasets` can find the rows.
    """
    path = Path(name)
    if (number := num_draws(name)) is not None:
        empty = {"role": "user", "content": []}
        return Opened(choose_split(ListRows([{"prompt": [empty]} for _ in range(number)]), name, split, asked_by))
    if is_file(name):
        if asked_by is not None:
            raise no_splits(name, asked_by)
        return Opened(read_json(path), path.parent) if path.suffix != ".parquet" else open_parquet(path, max_rows)
    if path.is_dir():
        return open_directory(path, split, subset, asked_by, max_rows)
    if ":" in name:
        return Opened(as_table(choose_split(call(name), name, split, asked_by), name))
    refuse_missing_path(name)
    if max_rows is not None:
        raise NotOpened(f"{name} is not here and is taken for a name on the hub")
    return Opened(load_with_datasets(name, subset, split))


def refuse_missing_path(name: str) -> None:
    """Raise DataError if a name can only be a path. Names on the hub are `name`, `owner/name` and `buckets/…`."""
    is_path = name.startswith((".", "/", "~")) or (name.count("/") > 1 and not name.startswith("buckets/"))
    if is_path or Path(name).is_file():
        kind = "is not a .parquet, .json or .jsonl file" if Path(name).exists() else "does not exist"
        raise DataError(f"{name} {kind}; name a file, a directory, a function or a hub name.")


def call(name: str) -> Any:
    """Call the function that `name` names, such as `file.py:function`. Raises DataError if it raises anything."""
    try:
        function = load_function(name)
    except LoadError as error:
        raise DataError(f"Dataset {name!r}: {error}") from error
    try:
        with chdir("."):  # the function may change the working directory
            return function()
    except (RLVLMError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise DataError(f"Dataset {name!r}: the function raised {type(error).__name__}: {text_of(error)}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of files in the block into a DataError that names `path`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (AttributeError, LookupError, RecursionError, TypeError) as error:  # JSON of another form
        raise DataError(f"{path} cannot be read: it is damaged ({type(error).__name__}: {error})") from error


def read_json(path: Path) -> ListRows:
    """Read rows from a list of objects (.json), or from one object per line (.jsonl), in UTF-8 with or without BOM."""
    with reading(path):
        if path.suffix == ".json":
            return as_rows(parse_json(path.read_bytes(), str(path)), str(path))
        with path.open("rb") as file:
            lines = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(file, 1) if line.strip()]
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


def open_parquet(path: Path, max_rows: int | None) -> Opened:
    """Open a Parquet file."""
    if max_rows is None:
        return Opened(load_with_datasets("parquet", None, "train", data_files=str(path)), path.parent)
    import pyarrow
    from pyarrow import parquet

    with reading(path), parquet.ParquetFile(path) as file:
        table = pyarrow.Table.from_batches(islice(file.iter_batches(max_rows), 1), file.schema_arrow)
        return Opened(plain_rows(table, str(path)), path.parent, file.metadata.num_rows - len(table))


def open_directory(path: Path, split: str, subset: str | None, asked_by: str | None, max_rows: int | None) -> Opened:
    """Open a directory written by `save_to_disk`, or a directory of data files."""
    saved, splits = path / "state.json", path / "dataset_dict.json"
    if saved.is_file() or splits.is_file():
        with reading(path):
            names = json.loads(splits.read_text())["splits"] if splits.is_file() else None
            found = path if names is None else {name: path / name for name in names}
            return open_saved(choose_split(found, str(path), split, asked_by), path, max_rows)
    if max_rows is not None:
        raise NotOpened(f"{path} is a directory of files, whose splits `datasets` finds")
    return Opened(load_with_datasets(str(path), subset, split), path)


def open_saved(path: Path, image_folder: Path, max_rows: int | None) -> Opened:
    """Open the rows of one split that `save_to_disk` wrote."""
    if max_rows is None:
        import datasets

        return Opened(ArrowRows(datasets.load_from_disk(path), str(path)), image_folder)
    import pyarrow

    files = [path / file["filename"] for file in json.loads((path / "state.json").read_text())["_data_files"]]
    table = pyarrow.concat_tables(pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all() for file in files)
    first = table.slice(0, max_rows)
    return Opened(plain_rows(first, str(path)), image_folder, len(table) - len(first))


def plain_rows(table: pyarrow.Table, name: str) -> ListRows | ArrowRows:
    """Return the rows of a table as the run reads them. `datasets` is imported if it stores values as JSON text."""
    if b'"Json"' not in (table.schema.metadata or {}).get(b"huggingface", b""):
        return ListRows(table.to_pylist())
    import datasets

    return ArrowRows(datasets.Dataset(table), name)


def load_with_datasets(path: str, subset: str | None, split: str, data_files: str | None = None) -> ArrowRows:
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


def choose_split(data: Any, name: str, split: str, asked_by: str | None) -> Any:
    """Return `split` if `data` is a dict of splits, else `data`."""
    if not isinstance(data, dict):
        if asked_by is not None:
            raise no_splits(name, asked_by)
        return data
    if split not in data:
        raise DataError(f"{name} has no split {split!r}; it has {', '.join(data)}.")
    return data[split]


def as_table(data: Any, name: str) -> ListRows | ArrowRows:
    """Convert a list of dicts or a Dataset to rows. Raises DataError for anything else."""
    return as_rows(data, name) if isinstance(data, list) else ArrowRows(data, name)


def as_rows(rows: Any, name: str) -> ListRows:
    """Convert a list of dicts to rows. Raises DataError for anything else."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{name}: expected a list of objects, one per row (in a .jsonl file: one object per line).")
    return ListRows(rows)
