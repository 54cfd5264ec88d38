"""One reader opens every kind of source, and the first rows that it reads are those of the run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from rl_vlm.data.sources import NotOpened, open_source
from rl_vlm.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": f"row {i}", "level": i, "image": {"bytes": b"x", "path": None}} for i in range(5)
]
SAYS = [[{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "image"}]}]]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def written(kind: str, dataset: datasets.Dataset) -> str:
    """Write a dataset in one of the forms of which the first rows can be read alone, and return its name."""
    match kind:
        case "parquet":
            dataset.to_parquet("rows.parquet")
            return "rows.parquet"
        case "saved":
            dataset.save_to_disk("saved", num_shards=2)
            return "saved"
        case _:
            datasets.DatasetDict({"train": dataset}).save_to_disk("splits")
            return "splits"


KINDS = pytest.mark.parametrize("kind", ["parquet", "saved", "splits"])


@KINDS
@pytest.mark.parametrize(("max_rows", "num_unread"), [(1, 4), (3, 2), (5, 0), (64, 0)])
def test_first_rows_are_those_of_the_run(kind: str, max_rows: int, num_unread: int):
    name = written(kind, datasets.Dataset.from_list(ROWS).cast_column("image", datasets.Image()))
    first, whole = open_source(name, "train", None, max_rows=max_rows), open_source(name, "train", None)
    assert list(first.rows) == list(whole.rows)[:max_rows] == ROWS[:max_rows]
    assert (first.num_unread, whole.num_unread) == (num_unread, 0)
    assert first.image_folder == whole.image_folder == (Path() if kind == "parquet" else Path(name))


@KINDS
def test_first_rows_of_values_that_datasets_store_as_json_are_those_of_the_run(kind: str):
    features = datasets.Features({"prompt": datasets.List(datasets.Json())})
    name = written(kind, datasets.Dataset.from_dict({"prompt": SAYS}, features))
    for opened in (open_source(name, "train", None, max_rows=1), open_source(name, "train", None)):
        assert opened.rows[0] == {"prompt": SAYS[0]}


def test_all_rows_of_files_and_functions_in_memory_are_read():
    Path("rows.json").write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}]))
    Path("made.py").write_text("def rows(): return {'dev': [{'prompt': 'a'}, {'prompt': 'b'}]}")
    for name in ("rows.json", "made.py:rows"):
        opened = open_source(name, "dev", None, max_rows=1)
        assert (list(opened.rows), opened.num_unread) == ([{"prompt": "a"}, {"prompt": "b"}], 0)


def test_first_rows_are_read_without_datasets_and_without_the_rest_of_the_file():
    blob = b"x" * 1_000_000
    schema = pyarrow.schema([("prompt", pyarrow.string()), ("image", pyarrow.binary())])
    with parquet.ParquetWriter("large.parquet", schema, compression="none", use_dictionary=False) as writer:
        for number in range(25):
            rows = [{"prompt": "a", "image": blob + bytes([number, row])} for row in range(8)]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))
    datasets.Dataset.from_list(ROWS).save_to_disk("saved")
    program = (
        "import sys, pyarrow; from rl_vlm.data.sources import open_source\n"
        "large, saved = (open_source(name, 'train', None, max_rows=2) for name in ('large.parquet', 'saved'))\n"
        "print(len(large.rows), large.num_unread, len(saved.rows), 'datasets' in sys.modules)\n"
        "print(pyarrow.default_memory_pool().max_memory())\n"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    *found, peak = run.stdout.split()
    assert found == ["2", "198", "2", "False"]
    assert int(peak) < 100_000_000


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("owner/data", "owner/data is not here and is taken for a name on the hub"),
        ("buckets/owner/data/part", "buckets/owner/data/part is not here and is taken for a name on the hub"),
        ("folder", "folder is a directory of files, whose splits `datasets` finds"),
    ],
)
def test_rows_that_only_datasets_can_find(name: str, reason: str):
    Path("folder").mkdir()
    with pytest.raises(NotOpened, match=f"^{reason}$"):
        open_source(name, "train", None, max_rows=64)


DAMAGED = [
    ("state.json", "{}"),
    ("state.json", "[]"),
    ("state.json", "3"),
    ("state.json", '{"_data_files": []}'),
    ("state.json", '{"_data_files": [{}]}'),
    ("state.json", "[" * 100_000),
    ("dataset_dict.json", "[]"),
    ("dataset_dict.json", "{}"),
    ("dataset_dict.json", '{"splits": 3}'),
    ("dataset_dict.json", '{"splits": [1]}'),
]
"""Files of saved data, and contents that `save_to_disk` does not write."""


@pytest.mark.parametrize("max_rows", [None, 64])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", r"^\./nowhere does not exist; name a file, a directory, a function or a hub name"),
        ("a/b/c", r"^a/b/c does not exist"),
        ("rows.csv", r"^rows\.csv is not a \.parquet, \.json or \.jsonl file"),
        ("broken.parquet", r"broken\.parquet"),
        ("broken", r"^broken cannot be read"),
        ("splits", r"^splits has no split 'train'; it has dev\."),
        *((f"damaged{i}", rf"^damaged{i} cannot be read: ") for i in range(len(DAMAGED))),
    ],
)
def test_what_cannot_be_opened_is_named_in_a_dry_run_and_in_a_run(name: str, message: str, max_rows: int | None):
    Path("rows.csv").write_text("prompt\na\n")
    Path("broken.parquet").write_text("no table")
    Path("broken").mkdir()
    Path("broken/state.json").write_text('{"_data_files": [{"filename": "none.arrow"}]}')
    datasets.DatasetDict({"dev": datasets.Dataset.from_list(ROWS)}).save_to_disk("splits")
    for i, (file, content) in enumerate(DAMAGED):
        Path(f"damaged{i}").mkdir()
        Path(f"damaged{i}", "dataset_info.json").write_text("{}")
        Path(f"damaged{i}", file).write_text(content)
    with pytest.raises(DataError, match=message):
        open_source(name, "train", None, max_rows=max_rows)
