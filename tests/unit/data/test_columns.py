"""Which columns are read under which name, and images in columns that nobody reads."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from rl_vlm.config.schema import DataConfig, RewardsConfig, RunConfig
from rl_vlm.data.columns import refuse_unread_media
from rl_vlm.data.images import looks_like_image
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.data.tables import ListRows
from rl_vlm.errors import DataError
from rl_vlm.reward.suite import RewardSuite

PICTURE = Image.new("RGB", (4, 2))


def png() -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    return file.getvalue()


BASE64 = base64.b64encode(png() * 9).decode()


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    PICTURE.save("a.png")


def load(*rows: dict, arrow: bool = False, **settings: Any) -> Rows:
    """Rows of a JSONL file, or of a Parquet file."""
    if arrow:
        datasets.Dataset.from_list(list(rows)).to_parquet("rows.parquet")
        return load_rows(DataConfig(dataset_name="rows.parquet", **settings), "train")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(DataConfig(dataset_name="rows.jsonl", **settings), "train")


def refuse(rows: Rows, *used: str) -> None:
    refuse_unread_media(rows.source, rows.config, rows.name, used)


# --- names


@pytest.mark.parametrize("arrow", [False, True])
def test_columns_are_read_under_the_names_that_they_have_here(arrow):
    row = {"photo": "a.png", "problem": "Which?", "answer": "7", "n": 1}
    names = {"image": "photo", "prompt": "problem", "solution": "answer"}
    rows = load(row, arrow=arrow, columns=names)
    refuse(rows)
    sample = rows[0]
    assert (sample.prompt, sample.columns, len(sample.images)) == ("Which?", {"solution": "7", "n": 1}, 1)
    assert sorted(rows.columns) == ["n", "solution"]
    filled = load(row, arrow=arrow, columns=names, prompt_template="{prompt} Now!")
    assert filled[0].prompt == "Which? Now!"


def test_two_columns_may_change_names():
    sample = load({"prompt": "7", "solution": "Which?"}, columns={"prompt": "solution", "solution": "prompt"})[0]
    assert (sample.prompt, sample.columns) == ("Which?", {"solution": "7"})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"image": "photos"},
            r"image from column 'photos', .*\(did you mean 'photo'\?\); .* are prompt, photo, so",
        ),
        ({"solution": "photo"}, r"solution from column 'photo', and there is a column 'solution' already"),
    ],
)
@pytest.mark.parametrize("arrow", [False, True])
def test_names_that_are_not_there_or_taken_are_refused(columns, message, arrow):
    with pytest.raises(DataError, match=f"rows.*: data.columns reads {message}"):
        load({"prompt": "a", "photo": "a.png", "solution": "7"}, arrow=arrow, columns=columns)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"columns": {"image": "a", "photo": "a"}}, "`columns` reads a as several columns"),
        ({"columns": {"image": "a"}, "ignore_columns": ["a"]}, "`columns` and `ignore_columns` both name a"),
    ],
)
def test_contradicting_names_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"model": {"model_name_or_path": "tiny"}, "data": data})


def test_ignored_columns_are_left_out():
    rows = load({"prompt": "a", "image": "a.png", "images": ["a.png"], "n": 1}, ignore_columns=["image", "n", "absent"])
    assert (rows[0].columns, len(rows[0].images), rows.columns) == ({}, 1, [])


def test_columns_are_those_of_all_rows():
    assert load({"prompt": "a"}, {"prompt": "b", "solution": "7"}).columns == ["solution"]
    turns = [{"from": "human", "value": "Hi"}]
    answered = [*turns, {"from": "gpt", "value": "7"}]
    assert load({"conversations": turns}, {"conversations": answered}).columns == ["solution"]
    assert load({"conversations": turns}, {"conversations": turns}).columns == []


# --- images that nobody reads

FORMS = {
    "path": "b/a.png", "capitals": "A.JPG", "url": "https://example.org/a.webp?size=3", "list": ["notes.txt", "a.jpeg"],
    "struct": {"path": "a.gif", "bytes": None}, "verl": [{"image": "a.png"}],
    "data url": f"data:image/png;base64,{BASE64}", "base64": BASE64, "bytes": png(),
    "struct of bytes": {"bytes": png(), "path": None}, "list of bytes": [png()],
    "fragment": "https://example.org/a.png#f", "jfif": "a.jfif", "struct of url": {"url": "x.png"},
    "other key": {"size": 3, "front": "a.png"},
    "block": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}}],
    "base64 in lines": base64.encodebytes(png() * 9).decode(),
    "base64 in lines of Windows": base64.encodebytes(png() * 9).decode().replace("\n", "\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arrow", [False, True])
def test_a_column_of_images_that_nobody_reads_is_refused_by_name(form, arrow):
    if not arrow and "bytes" in form:
        pytest.skip("JSON has no bytes")
    rows = load(
        {"prompt": "a", "image": "a.png", "photo": None}, {"prompt": "b", "image": "a.png", "photo": FORMS[form]},
        arrow=arrow,
    )  # fmt: skip
    with pytest.raises(
        DataError, match=r"images that nobody would read, in column photo \(row 1: .*columns: {image: p"
    ):
        refuse(rows)
    refuse(rows, "photo")
    refuse(load({"prompt": "b", "image": "a.png", "photo": "a.png"}, ignore_columns="photo"))


def test_pixels_that_nobody_reads_are_refused_without_decoding(monkeypatch):
    dataset = datasets.Dataset.from_list([{"prompt": "a", "img": {"bytes": png(), "path": None}}])
    dataset.cast_column("img", datasets.Image()).to_parquet("rows.parquet")
    rows = load_rows(DataConfig(dataset_name="rows.parquet"), "train")
    with pytest.raises(DataError, match=r"img \(row 0: a dict of bytes, path\)"):
        refuse(rows)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("decoded"))
    assert list(map(looks_like_image, rows.source.values("img"))) == [True]


def test_base64_is_not_printed():
    with pytest.raises(DataError, match=r"photo \(row 0: base64 text\)") as error:
        refuse(load({"prompt": "a", "photo": BASE64}))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "value",
    ["a text of png", "png", 3, None, ["x"], {"path": None}, "See a.png.\nWhat?", {"a": "b", "path": "notes.txt"}],
)
def test_other_columns_are_not_taken_for_images(value):
    refuse(load({"prompt": "a", "image": "a.png", "other": value, "id": "a.png"}))


def test_columns_of_a_template_are_read():
    row = {"image": "a.png", "photo": "b.png"}
    refuse(load(row, prompt_template="What is {photo[0]} in {photo}?"))
    with pytest.raises(DataError, match="photo"):
        refuse(load(row, prompt_template="What is this?"))


@pytest.mark.parametrize("arrow", [False, True])
def test_data_without_any_image_must_be_asked_for(arrow):
    row = {"prompt": "a", "solution": "7", "image": None, "images": []}
    with pytest.raises(
        DataError, match=r"rows.*: no row has an image .*columns are prompt, solution, image, images.*text_only"
    ):
        refuse(load(row, arrow=arrow))
    refuse(load(row, arrow=arrow, text_only=True))
    refuse(load(row, row | {"images": ["a.png"]}, arrow=arrow))


def test_images_in_data_that_is_to_be_text_are_refused():
    rows = load({"prompt": "a"}, {"prompt": "b", "image": "a.png"}, text_only=True)
    assert rows[0].images == []
    with pytest.raises(DataError, match=r"row 1: column image holds an image, and data.text_only is set"):
        rows[1]


def test_rewards_use_the_columns_that_they_name(tmp_path):
    Path("mine.py").write_text("def f(completions, photo, size, **kwargs): return []")
    function: Any = {"function": "mine.py:f", "kwargs": {"size": 3}}
    with RewardSuite(RewardsConfig(reward_funcs=[function])) as rewards:
        assert rewards.columns & {"photo", "size", "kwargs"} == {"photo"}


# --- names to leave out that are not there


def test_a_misspelt_name_to_leave_out_is_refused():
    with pytest.raises(DataError, match=r"rows.jsonl: data.ignore_columns names 'fotos'.*\(did you mean 'photos'\?\)"):
        load({"prompt": "a", "photos": "a.png"}, ignore_columns="fotos")


@pytest.mark.parametrize(("ignored", "settings"), [("fotos", {"eval_dataset_name": "b.jsonl"}), ("thumbnail", {})])
def test_a_name_to_leave_out_that_other_data_may_have_is_warned_of(ignored, settings, caplog):
    load({"prompt": "a", "photos": "a.png"}, ignore_columns=ignored, **settings)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"rows.jsonl: data.ignore_columns names '{ignored}', which is not there")
    caplog.clear()
    load({"prompt": "a", "photos": "a.png"}, ignore_columns="photos", **settings)
    assert caplog.records == []


# --- forms of functions


@pytest.mark.parametrize("value", [np.zeros((2, 2, 3), np.uint8), ("x", "a.png"), {"pair": ("a", png())}])
def test_forms_of_functions_that_nobody_reads_are_refused(value):
    rows = ListRows([{"prompt": "a", "image": "a.png", "other": value}])
    with pytest.raises(DataError, match=r"in column other \(row 0"):
        refuse_unread_media(rows, DataConfig(), "rows", [])


@pytest.mark.parametrize("value", [np.zeros((2, 2, 3)), np.zeros(3, np.uint8), ("x", 3), {"pair": ("a", b"b")}])
def test_arrays_and_tuples_without_an_image_pass(value):
    refuse_unread_media(ListRows([{"prompt": "a", "image": "a.png", "other": value}]), DataConfig(), "rows", [])


def test_an_array_is_a_filled_column_of_images():
    rows = ListRows([{"prompt": "a", "image": np.zeros((2, 2, 3), np.uint8)}])
    refuse_unread_media(rows, DataConfig(), "rows", [])


def test_a_file_that_is_looked_at_can_be_read_again():
    file = io.BytesIO(png())
    assert looks_like_image(file)
    assert file.read() == png()
