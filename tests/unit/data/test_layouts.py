"""Files as other systems write them load without settings."""

import base64
import io
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from launch import cli
from rl_vlm.config.schema import DataConfig
from rl_vlm.data.columns import refuse_unread_media
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.errors import DataError

RED, BLUE = (255, 0, 0), (0, 0, 255)
IMAGE = {"type": "image"}


def png(color: tuple = RED) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 2), color).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for name, color in (("red.png", RED), ("blue.png", BLUE)):
        Path(name).write_bytes(png(color))


def jsonl(*rows: dict) -> str:
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "train.jsonl"


def load(*rows: dict, **settings: Any) -> Rows:
    return load_rows(DataConfig(dataset_name=jsonl(*rows), **settings), "train")


def text(content: str) -> dict:
    return {"type": "text", "text": content}


def colors(rows: Rows, index: int = 0) -> list[Any]:
    return [image.getpixel((0, 0)) for image in rows[index].images]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "layout" in record.getMessage()]


# --- verl

VERL: dict[str, Any] = {  # as examples/data_preprocess/geo3k.py of verl writes a row
    "data_source": "hiyouga/geometry3k",
    "prompt": [{"content": "<image>Find x. Put the answer in \\boxed{}.", "role": "user"}],
    "images": [{"bytes": png(BLUE), "path": None}],
    "ability": "math",
    "reward_model": {"ground_truth": "3", "style": "rule"},
    "extra_info": {"answer": "3", "index": 0, "question": "<image>Find x.", "split": "train"},
}


def verl(*rows: dict) -> str:
    datasets.Dataset.from_list(list(rows)).to_parquet("train.parquet")
    return "train.parquet"


def test_verl(caplog):
    caplog.set_level(logging.INFO)
    rows = load_rows(DataConfig(dataset_name=verl(VERL)), "train")
    sample = rows[0]
    assert sample.messages == [
        {"role": "user", "content": [IMAGE, text("Find x. Put the answer in \\boxed{}.")]},
    ]
    assert sample.columns == {
        "data_source": "hiyouga/geometry3k", "ability": "math", "reward_model": VERL["reward_model"],
        "extra_info": VERL["extra_info"], "solution": "3",
    }  # fmt: skip
    assert (colors(rows), sorted(rows.columns)) == ([BLUE], sorted(sample.columns))
    assert logged(caplog) == ["train.parquet has the layout of verl: reward_model.ground_truth is the solution"]


def test_a_column_solution_of_verl_takes_precedence(caplog):
    caplog.set_level(logging.INFO)
    rows = load_rows(DataConfig(dataset_name=verl(VERL | {"solution": "x = 3"}, VERL | {"solution": None})), "train")
    assert [sample.columns["solution"] for sample in rows] == ["x = 3", "3"]
    assert logged(caplog) == ["train.parquet has the layout of verl: column solution is the solution"]


# --- EasyR1

EASYR1: dict[str, Any] = {"problem": "Is <image> or <image> red?", "answer": "the first"}


def test_easyr1(caplog):
    caplog.set_level(logging.INFO)
    rows = load(EASYR1 | {"images": ["red.png", {"path": "blue.png", "bytes": None}]})
    sample = rows[0]
    assert sample.prompt == "Is <image> or <image> red?"
    assert sample.messages == [
        {"role": "user", "content": [text("Is "), IMAGE, text(" or "), IMAGE, text(" red?")]},
    ]
    assert sample.columns == {"answer": "the first", "solution": "the first"}
    assert (colors(rows), sorted(rows.columns)) == ([RED, BLUE], ["answer", "solution"])
    assert logged(caplog) == ["train.jsonl has the layout of EasyR1: problem is the prompt, answer the solution"]
    refuse_unread_media(rows.source, rows.config, rows.name, [])


def test_columns_that_are_given_win_over_a_layout(caplog):
    caplog.set_level(logging.INFO)
    row = {"problem": "Find x.", "answer": "worked out", "label": "3"}
    sample = load(row, columns={"prompt": "problem", "solution": "label"})[0]
    assert (sample.prompt, sample.columns) == ("Find x.", {"answer": "worked out", "solution": "3"})
    assert logged(caplog) == []


def test_a_template_names_the_columns_of_a_layout(caplog):
    caplog.set_level(logging.INFO)
    rows = load({"problem": "Find x.", "answer": "3"}, prompt_template="{problem} Think.")
    assert rows[0].prompt == "Find x. Think."
    assert rows[0].columns == {"problem": "Find x.", "answer": "3", "solution": "3"}
    assert sorted(rows.columns) == ["answer", "problem", "solution"]
    assert logged(caplog) == ["train.jsonl has the layout of EasyR1: answer is the solution"]


# --- ms-swift

SWIFT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "<image>Find <ref-object> and <ref-object>."},
        {"role": "assistant", "content": "<bbox> and <bbox>"},
    ],
    "images": ["red.png"],
    "objects": {"ref": ["the dog", "the cat"], "bbox": [[331.5, 761, 853.5, 1594], [676, 685, 1099, 1427]]},
}


def test_ms_swift(caplog):
    caplog.set_level(logging.INFO)
    rows = load(SWIFT)
    sample = rows[0]
    assert sample.messages == [
        {"role": "system", "content": [text("You are a helpful assistant.")]},
        {"role": "user", "content": [IMAGE, text("Find the dog and the cat.")]},
    ]
    assert sample.columns == {
        "objects": SWIFT["objects"], "solution": "[331.5, 761, 853.5, 1594] and [676, 685, 1099, 1427]",
    }  # fmt: skip
    assert (colors(rows), sorted(rows.columns)) == ([RED], ["objects", "solution"])
    assert logged(caplog) == [
        "train.jsonl has the layout of ms-swift: messages is the prompt, a final answer the solution"
    ]


def test_a_column_solution_of_ms_swift_takes_precedence_over_a_final_answer():
    rows = load(SWIFT | {"solution": "gold"})
    assert rows[0].columns["solution"] == "gold"
    assert [message["role"] for message in rows[0].messages] == ["system", "user"]
    unanswered = load({"messages": [*SWIFT["messages"][:1], {"role": "user", "content": "Hi"}], "solution": "gold"})[0]
    assert (unanswered.prompt[-1], unanswered.columns) == ({"role": "user", "content": "Hi"}, {"solution": "gold"})


@pytest.mark.parametrize("box_type", ["real", "norm1", None])
def test_boxes_are_json_text_with_the_numbers_of_the_row(box_type):
    objects = {"ref": [], "bbox": [[0.1, 0.2, 0.3, 0.4], [1, 2]], "bbox_type": box_type, "image_id": [0, 0]}
    messages = [{"role": "user", "content": [text("What is in <bbox> and at <bbox>?"), IMAGE]}]
    rows = load({"messages": messages, "images": ["red.png"], "objects": objects})
    assert rows[0].messages[0]["content"] == [text("What is in [0.1, 0.2, 0.3, 0.4] and at [1, 2]?"), IMAGE]


def test_objects_without_marks_are_a_column():
    objects = {"ref": ["a dog"], "bbox": [[1, 2, 3, 4]]}
    rows = load({"messages": [{"role": "user", "content": "Find a dog."}], "objects": objects})
    assert (rows[0].prompt[0]["content"], rows[0].columns) == ("Find a dog.", {"objects": objects})


def test_objects_as_json_text():
    assert load(SWIFT | {"objects": json.dumps(SWIFT["objects"])})[0].messages == load(SWIFT)[0].messages


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (None, "2 marks <ref-object> and objects.ref has 0 values"),
        ([{"caption": "a dog", "bbox": [1, 2, 3, 4]}], "expected an object with ref and bbox"),
        ("no JSON", "found 'no JSON' for objects, expected an object with ref and bbox"),
    ],
)
def test_marks_that_nothing_fills_are_refused(objects, message):
    with pytest.raises(DataError, match=f"train.jsonl, row 0: .*{message}"):
        load(SWIFT | {"objects": objects})[0]


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"bbox": []}, "2 marks <bbox> and objects.bbox has 0 values"),
        ({"ref": ["a", "b", "c"]}, "2 marks <ref-object> and objects.ref has 3 values"),
        ({"bbox": [[1, 2, 3], [1, 2]]}, r"found \[\[1, 2, 3\], \[1, 2\]\] for objects.bbox, expected a list of boxes"),
        ({"ref": [1, 2]}, r"found \[1, 2\] for objects.ref, expected a list of names"),
        ({"bbox_type": "norm1000"}, "objects.bbox_type is 'norm1000'; it should be real or norm1"),
    ],
)
def test_objects_that_do_not_fit_the_marks_are_refused(objects, message):
    with pytest.raises(DataError, match=f"train.jsonl, row 0: .*{message}"):
        load(SWIFT | {"objects": SWIFT["objects"] | objects})[0]


# --- VLM-R1 and LLaVA


def test_llava_with_and_without_image(caplog):
    caplog.set_level(logging.INFO)
    several = [
        {"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A square."},
        {"from": "human", "value": "Which color?"}, {"from": "gpt", "value": "Red."},
    ]  # fmt: skip
    one = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    rows = load(
        {"id": "000000033471", "image": "red.png", "conversations": several},
        {"id": "wpnCFxt_0", "model": "", "conversations": one},
    )
    first, second = rows
    assert first.messages == [
        {"role": "user", "content": [IMAGE, text("\nWhat is this?")]},
        {"role": "assistant", "content": [text("A square.")]},
        {"role": "user", "content": [text("Which color?")]},
    ]
    assert first.columns == {"id": "000000033471", "solution": "Red."}
    assert second.messages == [{"role": "user", "content": [text("Hi")]}]
    assert (second.columns["solution"], colors(rows), second.images) == ("Hello.", [RED], [])
    assert logged(caplog) == [
        "train.jsonl has the layout of VLM-R1 and LLaVA: conversations is the prompt, its last answer the solution"
    ]


def test_base64_images_of_a_layout():
    rows = load(EASYR1 | {"problem": "<image>Red?", "images": [base64.b64encode(png() * 9).decode()]})
    assert colors(rows) == [RED]


def test_images_in_a_column_of_a_layout_that_rows_do_not_have_are_refused():
    rows = load({"prompt": "a", "image": "red.png", "answer": "blue.png"})
    with pytest.raises(DataError, match=r"nobody would read, in column answer"):
        refuse_unread_media(rows.source, rows.config, rows.name, [])


# --- what is ambiguous

TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "7"}]


@pytest.mark.parametrize(
    ("row", "names", "decides"),
    [
        ({"prompt": "a", "problem": "b", "answer": "3"}, "prompt and problem", "ignore_columns: [problem]"),
        (
            {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
            "prompt and messages",
            "{other_messages: mes",
        ),
        ({"prompt": "a", "conversations": TURNS}, "prompt and conversations", "ignore_columns: [conversations]"),
        ({"messages": SWIFT["messages"], "conversations": TURNS}, "conversations and messages", "[messages]"),
        (
            {"problem": "b", "answer": "3", "solution": "worked out"},
            "solution and answer",
            "ignore_columns: [solution]",
        ),
        ({"conversations": TURNS, "solution": "8"}, "solution and conversations", "ignore_columns: [solution]"),
        (
            {"conversations": TURNS, "reward_model": {"ground_truth": "7"}, "solution": "8"},
            "solution and conversations and reward_model",
            "ignore_columns: [solution]",
        ),
    ],
)
def test_two_columns_for_one_thing_are_refused(row, names, decides):
    with pytest.raises(DataError, match=f"train.jsonl, row 0: columns {names} are filled") as error:
        load(row)[0]
    assert decides in str(error.value)


def test_the_settings_that_an_error_names_decide():
    row = {"prompt": "a", "problem": "b", "answer": "3"}
    assert load(row, ignore_columns=["problem"])[0].prompt == "a"
    assert load(row, ignore_columns=["prompt"])[0].columns == {"answer": "3", "solution": "3"}
    assert load(row, columns={"other_problem": "problem"})[0].columns == {"other_problem": "b", "answer": "3"}


def test_equal_solutions_are_not_ambiguous():
    assert load({"conversations": TURNS, "solution": 7})[0].columns == {"solution": 7}


def test_one_file_may_hold_rows_of_several_layouts():
    rows = load({"prompt": "a", "solution": "1"}, {"conversations": TURNS}, {"problem": "b", "answer": "3"})
    assert [sample.columns["solution"] for sample in rows] == ["1", "7", "3"]


# --- in a run


@pytest.mark.parametrize("rows", ["verl", "easyr1", "swift"])
def test_a_dry_run_of_each_layout_with_a_built_in_reward(rows, capsys):
    name = {
        "verl": lambda: verl(VERL), "easyr1": lambda: jsonl(EASYR1 | {"images": ["red.png", "blue.png"]}),
        "swift": lambda: jsonl(SWIFT),
    }[rows]()  # fmt: skip
    Path("model").mkdir()
    Path("model/model.safetensors").touch()
    Path("model/config.json").write_text('{"model_type": "qwen2_5_vl"}')
    Path("run.yaml").write_text(
        "model: {model_name_or_path: model}\nrewards: {reward_funcs: [exact_match]}\n"
        f"data: {{dataset_name: {name}}}\ntrain: {{output_dir: run, prompts_per_step: 1}}\n"
    )
    assert cli.main(["train", "run.yaml", "--dry-run"]) == 0
    assert f"# Checked: train data {name}: 1 rows, of which the first was read." in capsys.readouterr().out
