import base64
import io
import json
import struct
import sys
import tracemalloc
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image, ImageFile

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.images import open_image
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.errors import DataError

RED, BLUE = (255, 0, 0), (0, 0, 255)
IMAGE = {"type": "image"}


def text(content: str) -> dict:
    return {"type": "text", "text": content}


def picture(color: tuple = RED, size: tuple = (4, 2)) -> Image.Image:
    return Image.new("RGB", size, color)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def colors(images: list[Image.Image]) -> list[Any]:
    return [image.getpixel((0, 0)) for image in images]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch):
    """Opens what a function `rows_module:make` returns."""

    def open_rows(made: Any, **settings: Any) -> Rows:
        module = ModuleType("rows_module")
        module.make = lambda: made  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "rows_module", module)
        return load_rows(DataConfig(dataset_name="rows_module:make", **settings), "train")

    return open_rows


def write_lines(path: str, *rows: dict) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- sources


ROWS = [{"prompt": "Which digit?", "solution": "7"}, {"prompt": "And this?", "solution": "8"}]


def save(kind: str) -> str:
    """Writes ROWS in one of the forms that `dataset_name` takes, and returns the name."""
    dataset = datasets.Dataset.from_list(ROWS)
    match kind:
        case "json":
            Path("rows.json").write_text(json.dumps(ROWS))
        case "jsonl":
            write_lines("rows.jsonl", *ROWS)
        case "parquet":
            dataset.to_parquet("rows.parquet")
        case "folder":
            write_lines("folder/train.jsonl", *ROWS)
        case "saved":
            dataset.save_to_disk("saved")
        case "saved_splits":
            datasets.DatasetDict({"test": dataset.select([1]), "train": dataset}).save_to_disk("saved_splits")
        case "rows_file:make":
            Path("rows_file.py").write_text(f"def make():\n    return {ROWS!r}\n")
    return kind if kind in ("folder", "saved", "saved_splits", "rows_file:make") else f"rows.{kind}"


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "folder", "saved", "saved_splits", "rows_file:make"])
def test_every_source_gives_the_same_samples(kind: str, monkeypatch: pytest.MonkeyPatch):
    Path("folder").mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    rows = load_rows(DataConfig(dataset_name=save(kind)), "train")
    first, second = rows
    assert len(rows) == 2
    assert (first.sample_id, second.sample_id) == ("0", "1")
    assert first.prompt == "Which digit?"
    assert first.messages == [{"role": "user", "content": [text("Which digit?")]}]
    assert first.images == []
    assert second.columns == {"solution": "8"}


def test_held_out_data_has_its_own_name_and_split():
    dataset = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": dataset, "held_out": dataset.select([1])}).save_to_disk("both")
    config = DataConfig(dataset_name="both", eval_dataset_name="both", dataset_test_split="held_out")
    assert [sample.prompt for sample in load_rows(config, "eval")] == ["And this?"]
    assert len(load_rows(config, "train")) == 2


def test_a_json_line_may_hold_a_unicode_line_separator():
    Path("rows.jsonl").write_text('{"prompt": "one\u2028line"}\n\n{"prompt": "two"}\n', encoding="utf-8")
    rows = load_rows(DataConfig(dataset_name="rows.jsonl"), "train")
    assert [sample.prompt for sample in rows] == ["one\u2028line", "two"]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_byte_order_mark_is_not_read_as_content(name):
    content = json.dumps(ROWS) if name == "rows.json" else "\n".join(map(json.dumps, ROWS))
    Path(name).write_text(content, encoding="utf-8-sig")
    assert [sample.prompt for sample in load_rows(DataConfig(dataset_name=name), "train")] == [
        "Which digit?", "And this?",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_byte_that_is_not_utf_8_is_named_with_its_line(name):
    lines = ['{"prompt": "a"}', '{"prompt": "Größe"}']
    content = f"[{lines[0]},\n{lines[1]}]" if name == "rows.json" else "\n".join(lines)
    Path(name).write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=rf"{name}, line 2: not UTF-8: found byte 0xf6 after .*Gr'"):
        load_rows(DataConfig(dataset_name=name), "train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "missing.jsonl"),
        ("missing.parquet", None, "missing.parquet"),
        ("broken.jsonl", '{"prompt": "a"}\n{"prompt": ', "broken.jsonl, line 2"),
        ("object.json", '{"prompt": "a"}', "object.json: expected a list"),
        ("deep.jsonl", '{"prompt": "a"}\n{"prompt": ' + "[" * 200_000, "deep.jsonl, line 2: .* nested too deeply"),
        ("empty.jsonl", "", "has no rows"),
        ("no_such_module:make", None, "no_such_module"),
        ("json:no_such_function", None, "no_such_function"),
        (None, None, "data.dataset_name is not set"),
    ],
)
def test_an_unusable_source_is_named(name: str | None, content: str | None, message: str):
    if name and content is not None:
        Path(name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_rows(DataConfig(dataset_name=name), "train")


def test_a_split_that_does_not_exist_is_named_with_those_that_do(rows_of):
    with pytest.raises(DataError, match="no split 'train'; it has validation, test"):
        rows_of({"validation": ROWS, "test": ROWS})


def test_a_transform_is_refused_since_it_would_be_left_out(rows_of):
    with pytest.raises(DataError, match="transform"):
        rows_of(datasets.Dataset.from_list(ROWS).with_transform(lambda batch: batch))


# --- sample ids


def test_ids_come_from_column_id_or_the_row_index(rows_of):
    rows = rows_of([{"prompt": "a", "id": 17}, {"prompt": "b"}, {"prompt": "c", "id": "x"}])
    assert rows.sample_ids == ["17", "1", "x"]
    assert rows[0].columns == {"id": 17}


@pytest.mark.parametrize("as_dataset", [False, True])
def test_an_id_that_occurs_twice_is_refused(rows_of, as_dataset: bool):
    rows = [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"}, {"prompt": "c", "id": "x"}]
    with pytest.raises(DataError, match="rows 0 and 2 have the same id 'x'"):
        rows_of(datasets.Dataset.from_list(rows) if as_dataset else rows)


# --- prompts


def test_messages_are_copied_into_content_blocks(rows_of):
    prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [text("Hello")]}]
    sample = rows_of([{"prompt": prompt}])[0]
    assert sample.prompt == prompt
    assert sample.messages == [
        {"role": "user", "content": [text("Hi")]},
        {"role": "assistant", "content": [text("Hello")]},
    ]


def test_system_prompt_goes_in_front_where_there_is_none(rows_of):
    own = [{"role": "system", "content": "Mine"}, {"role": "user", "content": "Hi"}]
    none = [{"role": "user", "content": "Hi"}]
    rows = rows_of([{"prompt": own}, {"prompt": none}, {"prompt": "Hi"}], system_prompt="Be brief")
    assert [sample.messages[0]["content"] for sample in rows] == [
        [text("Mine")],
        [text("Be brief")],
        [text("Be brief")],
    ]
    assert [len(sample.messages) for sample in rows] == [2, 2, 2]
    assert rows[1].prompt == [{"role": "system", "content": "Be brief"}, *none]
    assert rows[2].prompt == "Hi"


def test_prompt_template_fills_in_columns(rows_of):
    rows = rows_of([{"question": "1+1?", "solution": "2"}], prompt_template="{question} Write {{}} around it.")
    assert rows[0].prompt == "1+1? Write {} around it."
    assert rows[0].columns == {"question": "1+1?", "solution": "2"}


def test_a_missing_column_is_reported_with_those_that_exist(rows_of):
    with pytest.raises(DataError, match=r"row 0.*`prompt`.*question, answer"):
        rows_of([{"question": "1+1?", "answer": "2"}])
    with pytest.raises(DataError, match=r"KeyError 'problem'.*question, answer"):
        rows_of([{"question": "1+1?", "answer": "2"}], prompt_template="{problem}")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{question} Answer.", "1+1? Answer."),
        ("{question!r}", "'1+1?'"),
        ("{meta[topic]}", "sums"),
        ("{question:>9}", "     1+1?"),
    ],
)
def test_a_null_in_a_template_does_not_become_text(rows_of, template, prompt):
    row = {"question": "1+1?", "meta": {"topic": "sums"}}
    rows = rows_of([row, {"question": None, "meta": {"topic": None}}], prompt_template=template)
    assert rows[0].prompt == prompt
    with pytest.raises(DataError, match=r"row 1: .* cannot be filled: ValueError `(question|meta\[topic\])` is null"):
        rows[1]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (float("nan"), "is null"), (np.float32("nan"), "is null"), (["a"], "is a list, neither text nor a number"),
        ({"a": 1}, "is a dict"), (b"a", "is a bytes"), (np.zeros(2), "is a ndarray"),
    ],
)  # fmt: skip
def test_a_template_takes_plain_values_alone(rows_of, value, found):
    rows = rows_of([{"question": value}], prompt_template="{question}?")
    with pytest.raises(DataError, match=f"row 0: .* cannot be filled: ValueError `question` {found}"):
        rows[0]


@pytest.mark.parametrize(
    ("value", "filled"),
    [("", "?"), (7, "7?"), (0.5, "0.5?"), (True, "True?"), (np.int64(7), "7?"), (np.True_, "True?")],
)
def test_a_template_is_filled_with_text_numbers_and_booleans(rows_of, value, filled):
    assert rows_of([{"question": value}], prompt_template="{question}?")[0].prompt == filled


@pytest.mark.parametrize("image", [None, picture()])
@pytest.mark.parametrize(
    "prompt",
    ["", " \n", [{"role": "user", "content": " "}], [{"role": "user", "content": []}],
     [{"role": "system", "content": "Be brief"}, {"role": "user", "content": [text("")]}]],
)  # fmt: skip
def test_an_empty_prompt_is_refused(rows_of, prompt, image):
    with pytest.raises(DataError, match=r"row 0: the prompt is"):
        rows_of([{"prompt": prompt, "image": image}])[0]
    with pytest.raises(DataError, match=r"row 0: the prompt is"):
        rows_of([{"question": " ", "image": image}], prompt_template="{question}")[0]


def test_an_image_alone_is_a_prompt_if_the_row_says_so(rows_of):
    rows = rows_of([{"prompt": "<image>", "image": picture()}])
    assert rows[0].messages == [{"role": "user", "content": [IMAGE]}]


# --- marks


MARKED = "Is <image> or <image> red?"
MARKED_BLOCKS = [text("Is "), IMAGE, text(" or "), IMAGE, text(" red?")]


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": MARKED}, {}),
        ({"prompt": [{"role": "user", "content": MARKED}]}, {}),
        ({"prompt": [{"role": "user", "content": [text(MARKED)]}]}, {}),
        ({"prompt": [{"role": "user", "content": [text("Is "), IMAGE, text(" or <image> red?")]}]}, {}),
        ({"question": MARKED}, {"prompt_template": "{question}"}),
        ({"what": "red"}, {"prompt_template": "Is <image> or <image> {what}?"}),
        ({"problem": MARKED}, {"columns": {"prompt": "problem"}}),
        ({"conversations": [{"from": "human", "value": MARKED}]}, {}),
    ],
)
def test_a_mark_is_the_place_of_an_image_in_every_form_of_prompt(rows_of, row, settings):
    both = rows_of([row | {"images": [picture(RED), picture(BLUE)]}], **settings)[0]
    assert both.messages == [{"role": "user", "content": MARKED_BLOCKS}]
    assert colors(both.images) == [RED, BLUE]
    for num_images in (0, 1, 3):
        with pytest.raises(
            DataError, match=f"row 0: the prompt has 2 image blocks and the row has {num_images} images"
        ):
            rows_of([row | {"images": [picture()] * num_images}], **settings)[0]


def test_marks_of_sound_are_refused_in_text(rows_of):
    with pytest.raises(DataError, match="row 0: the text has a mark <audio>, and audio is not in this project"):
        rows_of([{"prompt": "What is in <audio>?", "image": picture()}])[0]


@pytest.mark.parametrize("prefix", ["data:image/png;base64,", ""])
def test_an_image_pasted_into_a_text_is_refused_and_not_printed(rows_of, prefix):
    pasted = f"What is {prefix}{base64.b64encode(encoded(NOISE)).decode()}?"
    for prompt in (pasted, [{"role": "user", "content": [text(pasted)]}]):
        with pytest.raises(DataError, match=r"row 0: the text holds an image as base64 .*column `image`") as error:
            rows_of([{"prompt": prompt}])[0]
        assert len(str(error.value)) < 400


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_base64_in_lines_is_found_in_a_text_and_read_as_an_image(rows_of, line_break):
    pasted = base64.encodebytes(encoded(NOISE)).decode().replace("\n", line_break)
    with pytest.raises(DataError, match=r"row 0: the text holds an image as base64"):
        rows_of([{"prompt": f"What is {pasted}?"}])[0]
    (image,) = rows_of([{"prompt": "What?", "image": pasted}])[0].images
    assert image.tobytes() == NOISE.convert("RGB").tobytes()


def test_words_behind_the_letters_of_a_format_are_no_image(rows_of):
    words = "R0lGOD " + "as in a word and another " * 4000
    assert rows_of([{"prompt": words}])[0].prompt == words


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, "video"),
        ({"role": "user", "content": [{"type": "audio"}]}, "audio"),
        ({"role": "user", "content": [{"type": "image", "image": "a.png"}]}, "image in .*column `images`"),
        ({"role": "user", "content": [{"type": "image", "max_pixels": 100}]}, "max_pixels"),
        ({"role": "user", "content": [text("a") | {"text": None}]}, "None"),
        ({"role": "user", "content": None}, "None"),
        ({"role": "tool", "content": "3"}, "'tool'"),
        ({"role": "user", "content": "a", "tool_calls": [1]}, "tool_calls"),
    ],
)
def test_content_that_would_be_lost_is_refused_by_name(rows_of, message: dict, found: str):
    with pytest.raises(DataError, match=f"row 0.*{found}"):
        rows_of([{"prompt": [message]}])[0]


def test_keys_that_arrow_filled_with_none_are_no_content(rows_of):
    prompt = [{"role": "user", "content": [IMAGE, text("What?")]}]
    rows = rows_of(datasets.Dataset.from_list([{"prompt": prompt, "image": encoded(picture())}]))
    assert rows[0].messages == prompt


# --- VLM-R1's rows


def test_vlm_r1_rows_are_read_as_they_are():
    Path("images").mkdir()
    picture(RED).save("images/red.png")
    picture(BLUE).save("images/blue.png")
    one = [{"from": "human", "value": "<image>\nWhich color?"}, {"from": "gpt", "value": "<answer>red</answer>"}]
    two = [{"from": "human", "value": "Is <image> or <image> red?"}, {"from": "gpt", "value": 1}]
    write_lines(
        "vlm_r1.jsonl",
        {"id": 1, "image": "red.png", "conversations": one, "solution": None},
        {"id": 2, "image": ["red.png", "blue.png"], "conversations": two, "accu_reward_method": "default"},
    )
    first, second = load_rows(DataConfig(dataset_name="vlm_r1.jsonl", image_root="images"), "train")
    assert first.messages == [{"role": "user", "content": [IMAGE, text("\nWhich color?")]}]
    assert first.columns == {"id": 1, "solution": "<answer>red</answer>"}
    assert second.messages == [{"role": "user", "content": [text("Is "), IMAGE, text(" or "), IMAGE, text(" red?")]}]
    assert colors(second.images) == [RED, BLUE]
    assert second.columns == {"id": 2, "solution": 1, "accu_reward_method": "default"}


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        ({"from": "human", "value": "<video>\nWhat happens?"}, "video"),
        ({"from": "robot", "value": "Hi"}, "robot"),
        ({"from": "human"}, "value"),
        ("human", "found turn 'human'"),
        ({"from": "human", "value": None}, "None.*expected `value`, which is text"),
        ({"from": "human", "value": ["a", "b"]}, "'a', 'b'.*expected `value`, which is text"),
        ({"from": ["human"], "value": "a"}, "found turn"),
    ],
)
def test_a_turn_that_cannot_be_read_is_named(rows_of, turn: Any, found: str):
    with pytest.raises(DataError, match=f"row 0.*{found}"):
        rows_of([{"conversations": [turn, {"from": "gpt", "value": "7"}]}])[0]


@pytest.mark.parametrize(
    "turns", [{"from": ["human", "gpt"], "value": ["Hi", "7"]}, {"from": "human", "value": "Hi"}, "Hi"]
)
def test_conversations_that_are_no_list_are_refused(rows_of, turns):
    with pytest.raises(DataError, match=r"row 0: found .* for `conversations`, expected a list of turns"):
        rows_of([{"conversations": turns}])[0]


def test_a_row_that_raises_anything_is_named(rows_of):
    class Broken(list):
        def __iter__(self) -> Any:
            raise RuntimeError("broken")

    with pytest.raises(DataError, match=r"rows_module:make, row 1: it cannot be read: RuntimeError: broken"):
        rows_of([{"prompt": "a"}, {"prompt": Broken([1])}])[1]


# --- images


def test_images_of_every_form_and_number(rows_of):
    picture(BLUE).save("blue.png")
    png = encoded(picture(RED))
    forms = [picture(RED), png, {"bytes": png, "path": None}, {"bytes": None, "path": "blue.png"}, "blue.png"]
    rows = rows_of([{"prompt": "What?", "images": forms}, {"prompt": "What?", "image": png}, {"prompt": "What?"}])
    assert colors(rows[0].images) == [RED, RED, RED, BLUE, BLUE]
    assert rows[0].messages == [{"role": "user", "content": [IMAGE] * 5 + [text("What?")]}]
    assert colors(rows[1].images) == [RED]
    assert rows[1].columns == {}
    assert rows[2].images == []


def test_images_go_before_the_first_user_text_after_the_system_message(rows_of):
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
    messages = rows_of([{"prompt": prompt, "image": picture()}])[0].messages
    assert [message["content"] for message in messages] == [[text("S")], [IMAGE, text("A")], [text("B")]]


@pytest.mark.parametrize(("blocks", "images"), [(1, 0), (1, 2), (3, 2)])
def test_blocks_and_images_must_agree_in_number(rows_of, blocks: int, images: int):
    row = {"prompt": [{"role": "user", "content": [IMAGE] * blocks}], "images": [picture()] * images}
    with pytest.raises(DataError, match=f"row 0: the prompt has {blocks} image blocks and the row has {images} images"):
        rows_of([row])[0]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("tools", "the tools of a run are named in rollout.tools and rollout.environment"),
    ],
)
def test_columns_that_the_model_would_not_be_given_are_refused_by_name(rows_of, column, reason):
    rows = rows_of([{"prompt": "a", column: None}, {"prompt": "b", column: ["x"]}])
    assert rows[0].prompt == "a"
    with pytest.raises(DataError, match=rf"row 1: column {column} is filled; {reason}"):
        rows[1]


def test_an_empty_list_is_not_filled(rows_of):
    empty = {"video": [], "videos": [], "tools": []}
    red, blue = {"image": picture(RED), "images": []}, {"image": [], "images": [picture(BLUE)]}
    one, other = rows_of([{"prompt": "a"} | red | empty, {"prompt": "b"} | blue])
    assert colors(one.images + other.images) == [RED, BLUE]


def test_an_open_file_is_read_again_after_the_check(rows_of):
    file = io.BytesIO(encoded(picture(BLUE)))
    rows = rows_of([{"prompt": "a", "image": file}])
    for _ in range(2):
        rows.check(0, rows.source[0])
        assert colors(rows[0].images) == [BLUE]


def test_both_image_columns_filled_is_refused(rows_of):
    with pytest.raises(DataError, match="`image` and `images`"):
        rows_of([{"prompt": "What?", "image": picture(), "images": [picture()]}])[0]


@pytest.mark.parametrize("several", [False, True])
def test_opening_a_dataset_decodes_no_image(rows_of, several: bool, monkeypatch: pytest.MonkeyPatch):
    decoded = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: decoded.append(1) or load(image))
    feature = datasets.List(datasets.Image()) if several else datasets.Image()
    columns = {"prompt": ["a", "b"], "images": [[encoded(picture())] if several else encoded(picture())] * 2}
    features = datasets.Features({"prompt": datasets.Value("string"), "images": feature})
    rows = rows_of(datasets.Dataset.from_dict(columns, features))
    assert decoded == []
    assert colors(rows[1].images) == [RED]
    assert len(decoded) > 0


def test_paths_are_relative_to_the_data_file_or_image_root():
    for folder, color in (("data", RED), ("root", BLUE)):
        Path(folder).mkdir()
        picture(color).save(f"{folder}/a.png")
    write_lines("data/rows.jsonl", {"prompt": "What?", "image": "a.png"})
    beside = load_rows(DataConfig(dataset_name="data/rows.jsonl"), "train")
    rooted = load_rows(DataConfig(dataset_name="data/rows.jsonl", image_root="root"), "train")
    assert colors(beside[0].images + rooted[0].images) == [RED, BLUE]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.png", None, "No such file"),
        ("text.png", b"not an image", "PNG, JPEG"),
        ("cut.png", encoded(picture(size=(64, 64)))[:-40], "cannot be read"),
        ("drawing.ppm", encoded(picture(), "PPM"), "PNG, JPEG"),
        ("https://example.org/a.png", None, "URLs are not fetched"),
    ],
)
def test_an_unreadable_image_names_row_column_and_path(name: str, content: bytes | None, message: str):
    if content is not None:
        Path(name).write_bytes(content)
    write_lines("rows.jsonl", {"prompt": "a"}, {"prompt": "b", "image": name})
    with pytest.raises(DataError, match=f"rows.jsonl, row 1, column image, {name}: .*{message}"):
        load_rows(DataConfig(dataset_name="rows.jsonl"), "train")[1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "found a int"),
        ({"file": "a.png"}, "found a dict of file, expected one of image, bytes, path"),
        ({"image": "a.png", "max_pixels": 100}, r"max_pixels beside the image would have no effect; set data\.min_pix"),
        ("data:image/png;base64,YQ", "Incorrect padding"),
        ("x" * 100_000, "File name too long"),
    ],
)
def test_a_value_that_is_no_image_is_described_shortly(rows_of, value, message):
    with pytest.raises(DataError, match=rf"row 0, column image.*: .*{message}") as error:
        rows_of([{"prompt": "a", "image": value}])[0]
    assert len(str(error.value)) < 600


def test_images_of_verl_and_as_base64_text(rows_of):
    picture(BLUE).save("blue.png")
    png = encoded(NOISE)
    plain = base64.b64encode(png).decode()
    forms = [
        {"image": "blue.png"}, {"image": png}, {"image": {"bytes": png, "path": None}}, {"image": picture(RED)},
        {"bytes": None, "path": None, "image": f"file://{Path('blue.png').absolute()}"},
        plain, f"data:image/png;base64,{plain}", "\n".join(plain[i : i + 200] for i in range(0, len(plain), 200)),
    ]  # fmt: skip
    images = rows_of([{"prompt": "a", "images": forms}])[0].images
    assert colors([images[0], images[3], images[4]]) == [BLUE, RED, BLUE]
    assert all(images[i].tobytes() == NOISE.tobytes() for i in (1, 2, 5, 6, 7))


def test_the_pixel_cap_is_checked_on_the_header(rows_of, monkeypatch: pytest.MonkeyPatch):
    rows = rows_of([{"prompt": "a", "image": encoded(picture(size=(100, 50)))}], max_image_pixels=4999)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    with pytest.raises(DataError, match=r"row 0, column image: .*100 × 50 = 5000 pixels.*max_image_pixels = 4999"):
        rows[0]


def tiff_of_one_tile(width: int, height: int) -> bytes:
    """A grey TIFF of 1 × 1 pixels with a tile of this size."""
    tile = zlib.compress(bytes(width * height))
    fields = {256: 1, 257: 1, 258: 8, 259: 8, 262: 1, 277: 1, 322: width, 323: height, 324: 134, 325: len(tile)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    return struct.pack("<4sIH", b"II*\0", 8, len(fields)) + entries + bytes(4) + tile


def test_the_pixel_cap_is_checked_on_the_tiles_of_a_tiff(rows_of):
    row = {"prompt": "a", "image": tiff_of_one_tile(112, 48)}
    assert rows_of([row])[0].images[0].size == (1, 1)
    with pytest.raises(DataError, match=r"row 0, column image: .*112 × 48 = 5376 pixels.*max_image_pixels = 4999"):
        rows_of([row], max_image_pixels=4999)[0]


def test_base64_text_with_many_spaces_takes_no_more_memory_than_without():
    url = "data:image/png;base64," + "\n".join(["AA"] * 2**18)
    tracemalloc.start()
    with open_image(url, Path()) as file:
        peak = tracemalloc.get_traced_memory()[1]
        assert len(file.read()) == 3 * 2**17
    tracemalloc.stop()
    assert peak < 4 * len(url)


def test_exif_orientation_is_applied(rows_of):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90°
    row = {"prompt": "a", "image": encoded(picture(size=(4, 2)), "JPEG", exif=exif)}
    assert rows_of([row])[0].images[0].size == (2, 4)


def test_every_image_is_rgb_and_the_first_frame(rows_of):
    gif = encoded(picture(RED), "GIF", save_all=True, append_images=[picture(BLUE)])
    grey, clear = Image.new("L", (2, 2), 128), Image.new("RGBA", (2, 2), (*BLUE, 0))
    images = rows_of([{"prompt": "a", "images": [gif, encoded(grey), encoded(clear)]}])[0].images
    assert [image.mode for image in images] == ["RGB"] * 3
    assert colors(images) == [RED, (128, 128, 128), BLUE]


EXIF_TURNED, EXIF_UPRIGHT = Image.Exif(), Image.Exif()
EXIF_TURNED[0x0112], EXIF_UPRIGHT[0x0112] = 6, 1
NOISE = Image.fromarray(np.random.default_rng(0).integers(256, size=(20, 30, 3), dtype=np.uint8))
FRAMES = {"save_all": True, "append_images": [picture(BLUE, NOISE.size)]}


@pytest.mark.parametrize(
    ("format", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"exif": EXIF_UPRIGHT}), ("WEBP", {}), ("WEBP", {"lossless": True})],
)
def test_a_file_that_decodes_to_the_same_pixels_is_kept(rows_of, format: str, options: dict):
    file = encoded(NOISE, format, **options)
    Path("noise").write_bytes(file)
    sample = rows_of([{"prompt": "a", "images": [picture(), file, "noise", {"bytes": file, "path": None}]}])[0]
    assert sample.encoded_images == {1: file, 2: file, 3: file}
    with Image.open(io.BytesIO(file)) as decoded:
        assert all(image.tobytes() == decoded.tobytes() for image in sample.images[1:])


@pytest.mark.parametrize(
    ("image", "format", "options"),
    [
        (NOISE, "BMP", {}),
        (NOISE, "GIF", {}),
        (NOISE, "TIFF", {}),
        (NOISE.convert("L"), "JPEG", {}),
        (NOISE.convert("CMYK"), "JPEG", {}),
        (NOISE.convert("P"), "PNG", {}),
        (NOISE.convert("RGBA"), "PNG", {}),
        (Image.new("RGBA", (4, 2), (*BLUE, 9)), "WEBP", {}),
        (NOISE, "JPEG", {"exif": EXIF_TURNED}),
        (NOISE, "PNG", {"exif": EXIF_TURNED}),
        (NOISE, "WEBP", {"exif": EXIF_TURNED}),
        (NOISE, "PNG", FRAMES),
        (NOISE, "WEBP", FRAMES),
        (NOISE, "MPO", FRAMES),
    ],
)
def test_a_file_that_a_server_may_decode_otherwise_is_not_kept(rows_of, image: Image.Image, format: str, options: dict):
    sample = rows_of([{"prompt": "a", "image": encoded(image, format, **options)}])[0]
    assert sample.encoded_images == {}


def test_sixteen_bit_images_are_refused_instead_of_clipped_to_white(rows_of):
    deep = Image.fromarray(np.full((2, 2), 4096, np.uint16))
    with pytest.raises(DataError, match=r"mode I;16 .* 8 bits"):
        rows_of([{"prompt": "a", "image": encoded(deep)}])[0]


# --- splits


@pytest.mark.parametrize("made", [[{"prompt": "Hi"}], datasets.Dataset.from_list([{"prompt": "Hi"}])])
def test_a_split_of_data_without_splits_is_refused(rows_of, made):
    assert len(rows_of(made)) == 1
    with pytest.raises(DataError, match=r"rows_module:make has no splits, so data\.dataset_train_split 'trian' has no"):
        rows_of(made, dataset_train_split="trian")


def test_a_split_of_data_with_splits_is_chosen(rows_of):
    made = {"train": [{"prompt": "Hi"}], "dev": [{"prompt": "Hi"}] * 2}
    assert len(rows_of(made, dataset_train_split="dev")) == 2


def test_a_split_of_a_saved_dataset_is_refused():
    datasets.Dataset.from_list([{"prompt": "Hi"}]).save_to_disk("saved")
    config = DataConfig(eval_dataset_name="saved", dataset_test_split="train")
    with pytest.raises(DataError, match=r"saved has no splits, so data\.dataset_test_split 'train' has no effect"):
        load_rows(config, "eval")
