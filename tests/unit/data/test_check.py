"""Which rows are left out before a run, and what is said of them."""

import io
import json
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image, ImageFile

from rl_vlm.config.schema import DataConfig, ModelConfig, RewardsConfig
from rl_vlm.data.check import (
    UsableRows,
    check_rows,
    find_problems,
    fitting_rows,
    long_row,
    unfitting_rows,
    warn_of_dropped,
)
from rl_vlm.data.fingerprint import data_fingerprint
from rl_vlm.data.problems import MISSING_IMAGE
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.data.tables import ListRows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import DataError
from rl_vlm.reward.golds import answer_columns, gold_given
from rl_vlm.reward.suite import RewardSuite
from tests.tiny.build import build_tiny


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for i in range(6):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(f"{i}.png")


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    checkpoint = str(build_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny")))
    return load_processor(checkpoint, ModelConfig(model_name_or_path=checkpoint), DataConfig())


def load(changes: dict[int, dict], **settings: Any) -> Rows:
    """Six rows with an image each, of which some are changed."""
    rows = [{"id": f"r{i}", "prompt": "Which?", "image": f"{i}.png"} | changes.get(i, {}) for i in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(DataConfig(dataset_name="rows.jsonl", **settings), "train")


def check(rows: Rows) -> UsableRows:
    return check_rows(rows, [], Ranks())


def reasons(usable: UsableRows) -> dict[int, str]:
    return {each.record["row"]: each.record["reason"] for each in usable.dropped}


def make_unreadable() -> dict[str, str]:
    """Files that are no images, and what is said of each."""
    Path("text.png").write_text("no image")
    Image.new("RGB", (8, 8)).save("drawing.ppm")
    Image.new("RGB", (100, 50)).save("large.png")
    Path("folder.png").mkdir()
    os.mkfifo("fifo.png")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.png")
    return {
        "gone.png": "No such file", "text.png": "formats PNG, JPEG", "drawing.ppm": "formats PNG, JPEG",
        "large.png": "100 × 50 = 5000 pixels are more than data.max_image_pixels = 4999",
        "folder.png": "is a directory",
        "fifo.png": "is a FIFO; only regular files",
        "socket.png": "is a socket", "/dev/null": "is a device",
        "": "its path is empty", "https://example.org/a.png": "URLs are not fetched",
    }  # fmt: skip


def test_every_image_is_looked_for_before_the_run_and_none_is_decoded(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    for name, message in make_unreadable().items():
        rows = load({4: {"image": name}}, max_image_pixels=4999)
        with pytest.raises(DataError, match=rf"rows\.jsonl, row 4, column image.*{message}.*on_bad_row: drop"):
            check(rows)
        dropping = check(load({4: {"image": name}}, max_image_pixels=4999, on_bad_row="drop"))
        assert dropping.indices == [0, 1, 2, 3, 5]
        assert message in reasons(dropping)[4]


def test_rows_that_cannot_be_used_are_listed_with_their_reasons():
    two, gone = {"prompt": "<image> or <image>?"}, {"image": "gone.png"}
    usable = check(load({0: {"prompt": " "}, 2: {"prompt": "<audio> a"}, 3: two, 5: gone}, on_bad_row="drop"))
    assert usable.indices == [1, 4]
    assert [tuple(each.record[key] for key in ("data", "sample_id", "row")) for each in usable.dropped] == [
        ("rows.jsonl", "r0", 0), ("rows.jsonl", "r2", 2), ("rows.jsonl", "r3", 3), ("rows.jsonl", "r5", 5),
    ]  # fmt: skip
    expected = {
        0: "the prompt is ' '",
        2: "a mark <audio>",
        3: "2 image blocks and the row has 1 images",
        5: "gone.png",
    }
    assert all(expected[row] in reason for row, reason in reasons(usable).items())


def test_the_first_bad_row_is_named_and_the_others_counted():
    rows = load({2: {"image": "gone.png"}, 4: {"image": "lost.png"}, 5: {"prompt": ""}})
    with pytest.raises(
        DataError, match=r"row 2, .*gone\.png'\. 2 more of 6 rows cannot be used\. To leave such rows out"
    ):
        check(rows)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_ranks_share_the_rows_and_find_what_one_finds(size):
    rows = load({0: {"prompt": ""}, 3: {"image": "gone.png"}, 5: {"prompt": ""}})
    found = [set(find_problems(rows, range(6 * rank // size, 6 * (rank + 1) // size))) for rank in range(size)]
    assert {finding.row for finding in set().union(*found)} == {0, 3, 5}
    assert set().union(*found) == set(find_problems(rows, range(6)))
    assert sum(map(len, found)) == 3


@pytest.mark.parametrize("batch", [2, 1000])
def test_images_in_a_table_are_checked_by_their_headers(batch, monkeypatch):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    images = [file.getvalue(), file.getvalue()[:60], b"no image", file.getvalue()]
    table = {"prompt": ["a"] * 4, "images": [[{"bytes": image, "path": "x.png"}] for image in images]}
    dataset = datasets.Dataset.from_dict(table).cast_column("images", datasets.List(datasets.Image()))
    dataset.to_parquet("rows.parquet")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    monkeypatch.setattr("rl_vlm.data.tables.BATCH", batch)
    usable = check(load_rows(DataConfig(dataset_name="rows.parquet", on_bad_row="drop"), "train"))
    assert usable.indices == [0, 1, 3]  # a header is whole in row 1
    assert "row 2, column images, x.png: the image cannot be read: not an image" in reasons(usable)[2]


@pytest.mark.parametrize("error", [TypeError("unhashable"), BaseException("a panic\nof Rust")])
def test_a_row_that_raises_anything_is_a_finding(error, monkeypatch):
    def parse(row: dict, config: DataConfig, where: str, takes_empty: bool) -> Any:
        raise error if row["id"] == "r3" else DataError(f"{where}: bad")

    monkeypatch.setattr("rl_vlm.data.samples.parse_row", parse)
    with pytest.raises(DataError, match=r"row 0: bad\. 5 more"):
        check(load({}))
    found = {note.row: note.finding and note.finding.what for note in find_problems(load({}), range(6))}
    problem = {TypeError: "TypeError: unhashable", BaseException: "BaseException: a panic of Rust"}[type(error)]
    assert found[3] == f"rows.jsonl, row 3: it cannot be read: {problem}"


def test_an_error_of_the_check_is_agreed_on_by_all_ranks():
    """Another rank must not wait for the findings of the rank whose check fails."""
    rows, ranks, gathered = load({}, text_only=True), Ranks(), []
    ranks.gather = lambda values: gathered.append(values) or values  # type: ignore[method-assign]
    object.__setattr__(rows, "source", ListRows([{"prompt": "a", "photo": "0.png"}] * 6))
    with pytest.raises(DataError, match="images that nobody would read") as error:
        check_rows(rows, [], ranks)
    assert gathered == [[error.value]]
    assert error.value.on_all_ranks


def test_the_largest_images_and_the_longest_texts_are_noted():
    for name, size in {"a": (600, 500), "b": (512, 512), "c": (2000, 2000), "d": (1000, 1000)}.items():
        Image.new("RGB", size).save(f"{name}.png")
    large = {i: {"image": f"{name}.png"} for i, name in enumerate("abcd")}
    usable = check(load(large | {5: {"prompt": "x" * 2000}}))
    assert {row: pixels for row, pixels in usable.num_pixels.items() if pixels > 64} == {
        0: 300_000, 2: 4_000_000, 3: 1_000_000,
    }  # fmt: skip
    assert usable.largest(1) == [2, 5]
    assert usable.largest(2) == [2, 3, 5, 0]
    assert check(load(large, max_pixels=500_000)).num_pixels == {0: 300_000, 2: 500_000, 3: 500_000}


QUESTION = {"role": "user", "content": "Which?"}


def answered(**row: Any) -> dict[int, dict[str, Any]]:
    return {2: {"prompt": [QUESTION, {"role": "assistant", "content": "<answer>7</answer>"}]} | row}


def answer_error(rows: Rows, function: str = "format_tags") -> str:
    """What a run says of the data, whose rewards are this function."""
    suite = RewardSuite(RewardsConfig(reward_funcs=[function]))
    golds = answer_columns(rows.columns, suite.functions)
    with pytest.raises(DataError) as error:
        check_rows(rows, suite.columns, Ranks(), partial(gold_given, golds))
    return str(error.value)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"solution": "7"}, "solution"),
        ({"solution": r"\boxed{7}"}, "solution"),
        ({"ground_truth": 7}, "ground_truth"),
        ({"reward_model": {"style": "rule", "ground_truth": "7"}}, "reward_model"),
        ({"label": "7"}, "label"),
    ],
)
def test_a_prompt_that_ends_with_its_gold_answer_is_refused(row: dict[str, Any], column: str):
    message = answer_error(load(answered(**row)), f"{__name__}:by_label")
    assert "rows.jsonl, row 2: its prompt ends with its answer" in message
    assert f"in column {column}" in message and "data.columns: {messages: prompt}" in message


def by_label(completions: list[str], label: list[str] | None = None) -> list[float]:
    raise AssertionError("no completion is scored")


def test_the_named_column_map_splits_the_answer_off():
    rows = load({i: answered()[2] for i in range(6)}, columns={"messages": "prompt"})
    assert check(rows).indices == list(range(6))
    assert rows.parse(2).messages[-1]["role"] == "user"
    assert rows.parse(2).columns["solution"] == "<answer>7</answer>"


def test_an_answer_that_a_layout_brings_is_refused_under_another_name():
    """Mapping ms-swift's `messages` to `prompt` leaves its answers in the prompts."""
    rows = {i: {"prompt": None, "messages": [QUESTION, {"role": "assistant", "content": str(i)}]} for i in range(6)}
    message = answer_error(load(rows, columns={"prompt": "messages"}, ignore_columns=["prompt"]))
    assert "row 0" in message and "`prompt: messages` left out of data.columns" in message
    assert check(load(rows, ignore_columns=["prompt"])).indices == list(range(6))
    turns = [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "7"}]
    message = answer_error(load({i: {"prompt": turns} for i in range(6)}))
    assert "data.columns: {conversations: its name}" in message


def test_an_answered_row_can_be_dropped_and_another_ending_is_allowed():
    golds = partial(gold_given, ["solution"])
    usable = check_rows(load(answered(solution="7"), on_bad_row="drop"), [], Ranks(), golds)
    assert usable.indices == [0, 1, 3, 4, 5]
    assert len(check_rows(load(answered(solution="17")), [], Ranks(), golds)) == 6


def test_prompts_that_end_with_the_assistant_are_counted_once(caplog):
    question, answer = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "7"}
    assert len(check(load({i: {"prompt": [question, answer]} for i in (1, 4)}))) == 6
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("rows.jsonl: the prompts of 2 of 6 rows end with a message of the assistant")
    caplog.clear()
    check(load({1: {"prompt": [question, answer, question]}}))
    assert caplog.records == []


def test_a_fingerprint_takes_keys_of_several_types():
    def digest(value: Any) -> str:
        source = ListRows([{"prompt": "a", "scores": value}])
        return data_fingerprint(Rows("rows", source, ["0"], [], DataConfig()), [0])

    assert digest({1: "a", "b": [{None: 2, (1, 2): 3}]}) == digest({"b": [{(1, 2): 3, None: 2}], 1: "a"})
    assert digest({1: "a", "b": 2}) != digest({1: "a", "b": 3})


def test_no_row_left_is_an_error_that_says_why():
    bad = {i: {"prompt": ""} for i in range(6)}
    with pytest.raises(
        DataError, match=r"none of its 6 rows can be used\. 6 rows .* first because: rows.jsonl, row 0: the pr"
    ):
        check(load(bad, on_bad_row="drop"))


# --- prompts that are too long


def lengths(rows: Rows, builder: PromptBuilder) -> list[int]:
    return [len(builder.build(sample).token_ids) for sample in rows]


def test_long_prompts_are_listed_and_none_is_cut(processor):
    Image.new("RGB", (64, 64)).save("1.png")
    rows, builder = load({}), PromptBuilder(processor, DataConfig())
    limit = lengths(rows, builder)[0]
    usable = fitting_rows(check(rows), builder, limit)
    assert usable.indices == [0, 2, 3, 4, 5]
    assert [each.record for each in usable.dropped] == [
        {
            "data": "rows.jsonl", "sample_id": "r1", "row": 1, "tokens": limit + 63, "limit": limit,
            "reason": f"its prompt has {limit + 63} tokens, more than data.max_prompt_length {limit}",
        }
    ]  # fmt: skip


def test_without_a_limit_no_prompt_is_built(processor, monkeypatch):
    builder = PromptBuilder(processor, DataConfig(), max_tokens=5000)
    monkeypatch.setattr(builder, "build", lambda sample: pytest.fail("built"))
    usable = check(load({1: {"prompt": "a" * 4000}}))
    assert fitting_rows(usable, builder, None).indices == usable.indices


def test_all_prompts_too_long_name_the_limit_and_the_shortest(processor):
    builder = PromptBuilder(processor, DataConfig())
    rows = load({i: {"prompt": "Which? " * (i + 2)} for i in range(6)})
    shortest = min(lengths(rows, builder))
    with pytest.raises(DataError, match=rf"none of its 6 rows .*max_prompt_length 5; .* them has {shortest} tokens"):
        fitting_rows(check(rows), builder, 5)


def test_a_text_beyond_the_context_is_found_before_the_run(processor):
    """Of 3,000 words, one token or more each; the other rows are not built."""
    builder = PromptBuilder(processor, DataConfig(), max_tokens=2000)
    long = {3: {"prompt": "word " * 3000}}
    with pytest.raises(
        DataError, match=r"row 3: Sample r3: its prompt has \d+ tokens, .* takes at most 2000 .*max_position"
    ):
        fitting_rows(check(load(long)), builder, None)
    assert fitting_rows(check(load(long, on_bad_row="drop")), builder, None).indices == [0, 1, 2, 4, 5]
    assert reasons(fitting_rows(check(load(long)), builder, 50)).keys() == {3}  # dropped by max_prompt_length
    with pytest.raises(DataError, match=r"takes at most 2000"):
        fitting_rows(check(load(long)), builder, 100_000)


def test_images_that_cannot_be_decoded_are_left_out_if_all_prompts_are_built(processor):
    Image.effect_noise((64, 64), 50).convert("RGB").save("2.png")
    os.truncate("2.png", 500)
    rows = load({}, on_bad_row="drop")
    assert check(rows).dropped == []
    usable = fitting_rows(check(rows), PromptBuilder(processor, DataConfig()), 1000)
    assert "row 2, column image, 2.png: the image cannot be read" in reasons(usable)[2]


@pytest.mark.parametrize(("on_bad_row", "severity"), [("raise", "error"), ("drop", "warning")])
def test_the_kind_of_a_prompt_that_does_not_fit_is_that_of_its_error(processor, on_bad_row: str, severity: str):
    """An image that ends after its header, a text beyond the model's context, and one beyond the limit."""
    Image.effect_noise((64, 64), 50).convert("RGB").save("2.png")
    os.truncate("2.png", 500)
    rows = load({3: {"prompt": "word " * 3000}, 4: {"prompt": "word " * 300}}, on_bad_row=on_bad_row)
    builder = PromptBuilder(processor, DataConfig(), max_tokens=2000)
    found = [each.finding for each in unfitting_rows(check(rows), builder, None)]
    found += [each.finding for each in unfitting_rows(check(rows), builder, 100)]
    assert [(finding.severity, finding.kind, finding.row) for finding in found] == [
        (severity, "prompt beyond the model's context", 3),
        (severity, "unreadable image", 2),
        ("warning", "prompt with too many tokens", 3),
        ("warning", "prompt with too many tokens", 4),
    ]
    assert found[1].remedy == "Write the file again, or leave the row out."
    assert all(finding.what.startswith(f"rows.jsonl, row {finding.row}") for finding in found)


def test_an_error_about_rows_keeps_its_kind(processor):
    with pytest.raises(DataError) as error:
        check(load({2: {"image": "gone.png"}}))
    assert error.value.problem == MISSING_IMAGE


def test_what_is_left_out_is_logged(caplog):
    usable = check(load({2: {"image": "gone.png"}}, on_bad_row="drop"))
    warn_of_dropped(usable.dropped, Path("run/dropped_prompts.jsonl"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("rows.jsonl: 1 rows are left out and listed in run/dropped_prompts.jsonl. 1 rows cannot be")


def test_an_example_has_a_value_in_every_column_that_is_asked_for():
    rows = load({0: {"gold": None}, 1: {"gold": "3"}, 2: {"gold": "4", "hint": "a"}})
    for columns, row in ((["gold", "elsewhere"], 1), (["gold", "hint"], 2), ([], 0)):
        assert check(rows).example(columns).sample_id == rows.sample_ids[row]


def test_the_largest_number_of_videos_is_that_of_rows_that_are_used():
    clip = ["0.png", "1.png"]
    rows = load({1: {"videos": [clip]}, 3: {"videos": [clip, clip]}, 4: {"videos": [clip] * 3}}, on_bad_row="drop")
    for index in range(2):
        Image.new("RGB", (8, 8)).save(f"{index}.png")
    usable = check(rows)
    assert {row: len(headers) for row, headers in usable.headers.items()} == {1: 1, 3: 2, 4: 3}
    assert usable.most_videos == 3
    assert usable.without([long_row(rows, 4, num_tokens=9, limit=8)]).most_videos == 2
