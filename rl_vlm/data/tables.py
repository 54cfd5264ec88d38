"""Tables of rows, by index, by column and in batches.

`ListRows` are in memory, `ArrowRows` in an Arrow table. `MixedRows` concatenate several tables.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import numpy as np

from rl_vlm.errors import DataError

TableRow = dict[str, Any]
IMAGE_COLUMNS = ("image", "images")
VIDEO_COLUMNS = ("video", "videos")
MEDIA_COLUMNS = (*IMAGE_COLUMNS, *VIDEO_COLUMNS)
"""Columns with images and videos, which are decoded when a sample is made."""
SOURCE = "data_source"
"""Column with the name of a row's source, if there are several."""
BATCH = 1000


def is_filled(value: Any) -> bool:
    """Return whether a column's value is neither null nor an empty list."""
    return value is not None and not (isinstance(value, list | tuple) and not value)


class Table(Sequence[TableRow]):
    """Rows that are read by index, by column and in batches."""

    columns: list[str]

    @abstractmethod
    def batches(self, indices: range, columns: Collection[str]) -> Iterator[list[TableRow]]:
        """Yield lists of consecutive rows with `columns`, and perhaps others. Nothing is decoded."""

    def values(self, column: str) -> Iterator[Any]:
        """Yield the column's value in every row, or None. Nothing is decoded."""
        return (row.get(column) for batch in self.batches(range(len(self)), [column]) for row in batch)


class ListRows(Table):
    """Rows in memory. Rows may have different columns."""

    def __init__(self, rows: Sequence[TableRow]) -> None:
        self.rows = rows
        self.columns = list(dict.fromkeys(name for row in rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TableRow:
        return self.rows[index]

    def batches(self, indices: range, columns: Collection[str]) -> Iterator[list[TableRow]]:
        """Yield lists of consecutive rows with all their columns, since they are in memory."""
        for start in range(0, len(indices), BATCH):
            yield [self.rows[index] for index in indices[start : start + BATCH]]

    def select(self, names: Mapping[str, str]) -> ListRows:
        """Return the rows with the columns that `names` has, under new names."""
        return ListRows([{names[name]: value for name, value in row.items() if name in names} for row in self.rows])


class ArrowRows(Table):
    """A `datasets.Dataset`. A row is decoded when it is read, except columns of images and videos: bytes or a path."""

    def __init__(self, dataset: Any, name: str) -> None:
        import datasets

        if not isinstance(dataset, datasets.Dataset):
            raise DataError(f"{name} gives a {type(dataset).__name__}; expected a datasets.Dataset or a list of dicts.")
        if dataset.format["type"] == "custom":
            raise DataError(f"{name} has a transform, which would be left out; apply it with `map`, or return a list.")
        self.name = name
        self.tables: Any = dataset.with_format("arrow")
        self.columns = list(dataset.column_names)
        features = copy.deepcopy(dict(dataset.features))
        self.encoded_features = datasets.Features({name: keep_encoded(feature) for name, feature in features.items()})
        media = {name: self.encoded_features[name] for name in features.keys() & set(MEDIA_COLUMNS)}
        self.features = datasets.Features(copy.deepcopy(dict(dataset.features)) | media)

    def __len__(self) -> int:
        return len(self.tables)

    def __getitem__(self, index: int) -> TableRow:
        return self.features.decode_example(self.tables[index].to_pylist()[0])

    def batches(self, indices: range, columns: Collection[str]) -> Iterator[list[TableRow]]:
        """Yield lists of consecutive rows with some of their columns. Nothing is decoded, and bytes are open files."""
        selected = self.tables.select_columns([name for name in self.columns if name in columns])
        for start in range(indices.start, indices.stop, BATCH):
            stop = min(start + BATCH, indices.stop)
            table, rows = selected[start:stop], [TableRow() for _ in range(start, stop)]
            for name, column in zip(table.column_names, table.columns, strict=True):
                for row, value in zip(rows, array_values(column), strict=True):
                    row[name] = value
            yield [self.encoded_features.decode_example(row) for row in rows]

    def select(self, names: Mapping[str, str]) -> ArrowRows:
        """Return the rows with the columns that `names` has, under new names."""
        return ArrowRows(self.tables.select_columns(list(names)).rename_columns(dict(names)), self.name)


class MixedRows(Table):
    """The rows of several tables. If a row has no value in column `data_source`, it gets the name of its table."""

    def __init__(self, names: Sequence[str], tables: Sequence[Table]) -> None:
        self.names = names
        self.tables = tables
        self.starts = [0, *accumulate(map(len, tables))]
        self.columns = list(dict.fromkeys(chain(*(table.columns for table in tables), [SOURCE])))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> TableRow:
        number = bisect_right(self.starts, index) - 1
        return self.named(number, self.tables[number][index - self.starts[number]])

    def named(self, number: int, row: TableRow) -> TableRow:
        """Add column `data_source` to a row of table `number`, unless it has a value."""
        return row if row.get(SOURCE) is not None else row | {SOURCE: self.names[number]}

    def batches(self, indices: range, columns: Collection[str]) -> Iterator[list[TableRow]]:
        """Yield lists of consecutive rows with `columns` and `data_source`. A list has rows of one table."""
        for number, (start, table) in enumerate(zip(self.starts, self.tables, strict=False)):
            own = range(max(indices.start - start, 0), min(indices.stop - start, len(table)))
            for batch in table.batches(own, {*columns, SOURCE}):
                yield [self.named(number, row) for row in batch]


def keep_encoded(feature: Any) -> Any:
    """Turn off the decoding of images and other media in a feature, and return the feature."""
    if isinstance(feature, dict):
        return {name: keep_encoded(item) for name, item in feature.items()}
    if hasattr(feature, "feature"):
        feature.feature = keep_encoded(feature.feature)
    elif hasattr(feature, "decode") and type(feature).__name__ != "Json":  # Json holds the text of a value, not media
        feature.decode = False
    return feature


def array_values(array: Any) -> list[Any]:
    """Return the values of an Arrow array. Bytes become open files, to avoid a copy."""
    import pyarrow
    import pyarrow.types as types

    kind = array.type
    if isinstance(array, pyarrow.ChunkedArray):
        return [value for chunk in array.chunks for value in array_values(chunk)]
    if array.null_count == len(array):  # it may have no buffers
        return [None] * len(array)
    if types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        fields = [array_values(array.field(i)) for i in range(kind.num_fields)]
        values = [dict(zip(names, row, strict=True)) for row in zip(*fields, strict=True)]
    elif types.is_list(kind) or types.is_large_list(kind):
        items = iter(array_values(array.flatten()))  # items of null lists are left out
        values = [list(islice(items, length or 0)) for length in array.value_lengths().to_pylist()]
    elif types.is_binary(kind) or types.is_large_binary(kind):
        _, offsets, content = array.buffers()
        width = "int64" if types.is_large_binary(kind) else "int32"
        ends = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1].tolist()
        values = [pyarrow.BufferReader(content.slice(start, end - start)) for start, end in pairwise(ends)]
    else:
        return array.to_pylist()
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def is_plain(value: Any) -> bool:
    """Return whether a column's value is text, a number or None."""
    return value is None or isinstance(value, str | int | float)
