"""Names of data: splits behind an @, entries of a mixture, and what contradicts itself."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from rl_vlm.config.data_sources import data_sources
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.load import load_config
from rl_vlm.config.schema import DataConfig, RunConfig
from rl_vlm.data.samples import load_rows
from rl_vlm.errors import DataError


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    splits: Any = {name: Dataset.from_list([{"prompt": name}]) for name in ("train", "test", "dev")}
    DatasetDict(splits).save_to_disk("saved")


def prompts(which: Any = "train", **settings: Any) -> list[Any]:
    return [sample.prompt for sample in load_rows(DataConfig(**settings), which)]


def test_a_name_may_end_with_its_split():
    assert prompts(dataset_name="saved") == ["train"]
    assert prompts(dataset_name="saved@dev") == ["dev"]
    assert prompts(dataset_name="saved@dev", dataset_train_split="dev") == ["dev"]
    assert prompts("eval", eval_dataset_name="saved@dev") == ["dev"]
    Path("rows.py").write_text("def make(): return {'a': [{'prompt': 'of a'}], 'b': [{'prompt': 'of b'}]}")
    assert prompts(dataset_name="rows.py:make@b") == ["of b"]


def test_a_path_with_an_at_sign_wins():
    DatasetDict({"train": Dataset.from_list([{"prompt": "mine"}])}).save_to_disk("saved@dev")
    assert prompts(dataset_name="saved@dev") == ["mine"]
    Path("a@b.jsonl").write_text('{"prompt": "a"}\n')
    assert prompts(dataset_name="a@b.jsonl") == ["a"]
    with pytest.raises(DataError, match=r"missing@b\.jsonl cannot be read"):
        prompts(dataset_name="missing@b.jsonl")


@pytest.mark.parametrize("name", ["rows.jsonl@dev", "rows.py:make@dev"])
def test_a_split_of_data_without_splits_is_refused(name):
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    Path("rows.py").write_text("def make(): return [{'prompt': 'a'}]")
    with pytest.raises(DataError, match=r"has no splits, so split 'dev' of data\.dataset_name has no effect"):
        prompts(dataset_name=name)


def test_anything_that_a_function_raises_is_an_error_of_its_name():
    Path("raising.py").write_text("def make(): raise BaseException('a panic\\n\\x1b[31mof Rust')")
    with pytest.raises(DataError, match=r"'raising\.py:make': the function raised BaseException: a panic of Rust$"):
        prompts(dataset_name="raising.py:make")


def test_entries_without_a_split_have_that_of_the_section():
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    names = ["saved", "rows.jsonl", {"name": "saved", "split": "test"}]
    assert prompts(dataset_name=names, dataset_train_split="dev") == ["dev", "a", "test"]


A = {"name": "a.jsonl"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dataset_name": "owner/a@x", "dataset_train_split": "y"}, "ends with another split than `dataset_train_spl"),
        ({"eval_dataset_name": "owner/a@x", "dataset_test_split": "y"}, "another split than `dataset_test_split` y"),
        ({"dataset_name": [{"name": "owner/a@x", "split": "y"}]}, "ends with another split than its `split` y"),
        ({"dataset_name": ["a.jsonl", "b.jsonl"], "dataset_train_split": "y"}, "`dataset_train_split` has no effect"),
        ({"dataset_name": ["owner/a@x"], "dataset_train_split": "y"}, "`dataset_train_split` has no effect"),
        ({"dataset_name": [{**A, "dataset_config": "c"}], "dataset_config": "d"}, "`dataset_config` has no effect"),
        ({"dataset_name": [{**A, "weight": 1}, "b.jsonl"]}, "entries with and without `weight`; give every entry one"),
        ({"dataset_name": [{**A, "weight": 0}]}, "greater than 0"),
        ({"eval_dataset_name": [{**A, "weight": 1}]}, "of held-out data every row is evaluated once"),
        ({"dataset_name": ["a.jsonl", A]}, "a.jsonl several times; name it once, with a `weight`"),
        ({"dataset_name": []}, "an empty list"),
        ({"dataset_name": [{**A, "columns": {"image": "x", "photo": "x"}}]}, "`columns` reads x as several columns"),
        ({"dataset_name": [{**A, "columns": {"image": "x"}, "ignore_columns": "x"}]}, "both name x"),
        ({"dataset_name": [{**A, "image_root": "x"}], "image_root": "y"}, "`image_root` has no effect: every entry"),
    ],
)
def test_contradictions_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"model": {"model_name_or_path": "tiny"}, "data": data})


def test_a_mixture_is_read_back_from_the_resolved_settings():
    entries = "[{name: saved@dev, weight: 1}, {name: saved, weight: 2, columns: {prompt: q}}]"
    Path("run.yaml").write_text(f"model_name_or_path: m\ndataset_name: {entries}\n")
    config = load_config("run.yaml")
    Path("resolved.yaml").write_text(to_yaml(config))
    assert load_config("resolved.yaml") == config


def test_an_entry_can_undo_what_the_section_renames():
    entries = [{"name": "a.jsonl", "columns": {}}, "b.jsonl"]
    data = DataConfig.model_validate({"dataset_name": entries, "columns": {"prompt": "question"}})
    assert [entry.columns for entry in data_sources(data, "train")] == [{}, {"prompt": "question"}]
