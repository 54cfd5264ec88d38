"""Rows in memory and in Arrow tables: the same by index, by column and in batches."""

from typing import Any

import datasets
import pyarrow
import pytest

from rl_vlm.data.tables import ArrowRows, ListRows, array_values

ROWS = [{"a": 1, "b": "x", "image": b"one"}, {"a": None, "b": "y", "image": None}, {"a": 3, "b": "z", "image": b""}]


def with_bytes(value: Any) -> Any:
    """The value with the content of open files in their place."""
    if isinstance(value, list):
        return [with_bytes(item) for item in value]
    if isinstance(value, dict):
        return {name: with_bytes(item) for name, item in value.items()}
    return value.read() if hasattr(value, "read") else value


@pytest.fixture(params=["list", "arrow"])
def rows(request: pytest.FixtureRequest) -> ListRows | ArrowRows:
    return ListRows(ROWS) if request.param == "list" else ArrowRows(datasets.Dataset.from_list(ROWS), "rows")


def test_rows_by_index_by_column_and_in_batches(rows, monkeypatch):
    monkeypatch.setattr("rl_vlm.data.tables.BATCH", 2)
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert list(rows.values("a")) == [1, None, 3]
    assert with_bytes(list(rows.values("image"))) == [b"one", None, b""]
    batches = [[(row["a"], row["b"]) for row in batch] for batch in rows.batches(range(3), ["a", "b", "absent"])]
    assert batches == [[(1, "x"), (None, "y")], [(3, "z")]]
    assert [row["a"] for batch in rows.batches(range(1, 3), ["a"]) for row in batch] == [None, 3]
    assert len([row for batch in rows.batches(range(3), ["absent"]) for row in batch]) == 3


def test_columns_are_left_out_and_renamed_at_once(rows):
    changed = rows.select({"b": "image", "image": "b"})
    assert sorted(changed.columns) == ["b", "image"]
    assert changed[0] == {"image": "x", "b": b"one"}


def test_columns_are_those_of_all_rows():
    assert ListRows([{"a": 1}, {"b": 2, "a": 3}]).columns == ["a", "b"]


BYTES = [pyarrow.binary(), pyarrow.large_binary()]


@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_arrow_values_are_those_of_to_pylist_without_a_copy_of_bytes(kind):
    image = pyarrow.struct([("bytes", kind), ("path", pyarrow.string())])
    found = {"bytes": b"ab", "path": None}
    for values, type_of_values in [
        ([b"a", None, b"", b"xyz"], kind),
        ([found, None, {"bytes": None, "path": "p"}], image),
        ([[found, None], None, [], [{"bytes": None, "path": "q"}, found]], pyarrow.list_(image)),
        ([None, None], kind),
        ([], kind),
        ([[1], None, [2, 3]], pyarrow.list_(pyarrow.int64())),
    ]:
        array = pyarrow.array(values, type_of_values)
        both = pyarrow.chunked_array([array, array.slice(1)], type_of_values)
        assert with_bytes(array_values(both)) == values + values[1:]
    (file,) = array_values(pyarrow.array([b"abc"], kind))
    assert isinstance(file, pyarrow.BufferReader)


def test_values_that_datasets_store_as_json_are_read():
    features = datasets.Features({"prompt": datasets.List(datasets.Json())})
    prompt = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image"}]}]
    rows = ArrowRows(datasets.Dataset.from_dict({"prompt": [prompt]}, features), "rows")
    assert rows[0]["prompt"] == prompt
    assert list(rows.values("prompt")) == [prompt]
