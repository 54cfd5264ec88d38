"""Concatenation of several sources (`MixedRows`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

from rl_vlm.data.tables import Row, Table

SOURCE = "data_source"
"""Column with the name of a row's source."""


class MixedRows(Sequence[Row]):
    """The rows of several sources. If a row has no value in column `data_source`, it gets the name of its source."""

    def __init__(self, names: Sequence[str], sources: Sequence[Table]) -> None:
        self.names = names
        self.sources = sources
        self.starts = [0, *accumulate(map(len, sources))]
        self.columns = list(dict.fromkeys(chain(*(source.columns for source in sources), [SOURCE])))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Row:
        number = self.number(index)
        return self.named(number, self.sources[number][index - self.starts[number]])

    def number(self, index: int) -> int:
        """Return the number of a row's source."""
        return bisect_right(self.starts, index) - 1

    def named(self, number: int, row: Row) -> Row:
        """Add column `data_source` to a row, unless it has a value."""
        return row if row.get(SOURCE) is not None else row | {SOURCE: self.names[number]}

    def values(self, column: str) -> Iterator[Any]:
        """Yield the column's value in every row, or None."""
        for name, source in zip(self.names, self.sources, strict=True):
            values = source.values(column) if column in source.columns else (None for _ in range(len(source)))
            yield from ((name if column == SOURCE and value is None else value) for value in values)

    def batches(self, indices: range, columns: Collection[str]) -> Iterator[list[Row]]:
        """Yield lists of consecutive rows with some of their columns, and `data_source`. Nothing is decoded."""
        for number, source in enumerate(self.sources):
            start = self.starts[number]
            own = range(max(indices.start - start, 0), min(indices.stop - start, len(source)))
            if own:
                for batch in source.batches(own, {*columns, SOURCE}):
                    yield [self.named(number, row) for row in batch]


def mixed_ids(labels: Sequence[str], ids: Sequence[Sequence[str]]) -> list[str]:
    """Return the ids of all rows. If an id occurs in two sources, all ids are prefixed with their source's label."""
    flat = list(chain(*ids))
    if len(set(flat)) == len(flat):
        return flat
    return [f"{label}:{sample_id}" for label, own in zip(labels, ids, strict=True) for sample_id in own]
