"""Rows with videos: columns, marks, layouts of other systems, the check of the data, and digests."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import transformers
from PIL import Image

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.check import check_rows, fitting_rows
from rl_vlm.data.columns import refuse_unread_media
from rl_vlm.data.fingerprint import data_fingerprint
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.types import VideoFormat
from tests.helpers.builders import processor_of
from tests.helpers.video_files import moving_frames, write_video
from tests.tiny.build import build_tiny

IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    write_video(Path("a.mp4"), moving_frames(50))
    write_video(Path("b.mp4"), moving_frames(30))
    Image.new("RGB", (4, 2)).save("a.png")


def load(*rows: dict, **settings: Any) -> Rows:
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {"num_frames": 4}
    return load_rows(DataConfig(dataset_name="train.jsonl", **given | settings), "train")


def content(rows: Rows, index: int = 0) -> list[dict[str, Any]]:
    return rows[index].messages[0]["content"]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_a_row_gives_its_videos_in_order():
    rows = load({"prompt": "Which?", "videos": ["a.mp4", {"video": "b.mp4", "video_start": 0.4}], "solution": "a"})
    first, second = rows[0].videos
    assert (first.indices, second.indices) == ((0, 16, 33, 49), (10, 16, 23, 29))
    assert first.frames.shape == (4, 48, 64, 3)
    assert content(rows) == [VIDEO, VIDEO, text("Which?")]
    assert rows[0].columns == {"solution": "a"}


def test_marks_and_blocks_place_videos_and_images():
    blocks = [{"role": "user", "content": [VIDEO, text("Is it "), IMAGE, text("?")]}]
    media = {"video": "a.mp4", "image": "a.png"}
    rows = load({"prompt": "A <video> and <image>."} | media, {"prompt": blocks} | media, {"prompt": "What?"} | media,
                {"prompt": "In <image>?"} | media)  # fmt: skip
    assert content(rows, 0) == [text("A "), VIDEO, text(" and "), IMAGE, text(".")]
    assert content(rows, 1) == [VIDEO, text("Is it "), IMAGE, text("?")]
    assert content(rows, 2) == [IMAGE, VIDEO, text("What?")]
    assert content(rows, 3) == [VIDEO, text("In "), IMAGE, text("?")]


def test_marks_that_differ_in_number_from_videos_are_refused():
    rows = load({"prompt": "<video> or <video>?", "video": "a.mp4"}, {"prompt": "<video>?"})
    with pytest.raises(DataError, match="row 0: the prompt has 2 video blocks and the row has 1 videos"):
        rows[0]
    with pytest.raises(DataError, match="row 1: the prompt has 1 video blocks and the row has 0 videos"):
        rows[1]


def test_a_list_in_column_video_is_one_video_of_frames_or_several_videos():
    for number, pixels in enumerate(moving_frames(4)):
        Image.fromarray(pixels).save(f"{number}.png")
    frames = [f"{number}.png" for number in range(4)]
    rows = load({"prompt": "?", "video": frames}, {"prompt": "?", "video": ["a.mp4", "b.mp4"]},
                {"prompt": "?", "videos": [frames, "b.mp4"]}, {"prompt": "?", "videos": frames})  # fmt: skip
    assert [len(rows[index].videos) for index in range(3)] == [1, 2, 2]
    with pytest.raises(DataError, match=r"row 3, column videos, 0.png: .* it is an image \(PNG\), not a video"):
        rows[3]


def test_columns_tell_the_part_of_a_video():
    row = {"prompt": "?", "video": "a.mp4", "video_start": 0.4, "video_end": 1.2, "num_frames": 50}
    several = {"prompt": "?", "videos": ["a.mp4", "b.mp4"], "video_start": [0.4, None], "video_end": [1.2, 0.8]}
    rows = load(row, several, {"prompt": "?", "video": "a.mp4", "video_start": None})
    assert rows[0].videos[0].indices == (10, 16, 23, 29)
    assert rows[0].columns == {"video_start": 0.4, "video_end": 1.2, "num_frames": 50}
    assert [video.indices for video in rows[1].videos] == [(10, 16, 23, 29), (0, 6, 13, 19)]
    assert rows[2].videos[0].indices == (0, 16, 33, 49)
    assert check_rows(rows, [], Ranks()).indices == [0, 1, 2]


def test_a_column_tells_the_rate_of_given_frames():
    for number, pixels in enumerate(moving_frames(4)):
        Image.fromarray(pixels).save(f"{number}.png")
    rows = load({"prompt": "?", "video": [f"{number}.png" for number in range(4)], "fps": 8})
    assert rows[0].videos[0].times == [0, 0.125, 0.25, 0.375]


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"fps": 30}, "column video, a.mp4: .* fps beside .* set data.fps. Leave a"),
        ({"nframes": 8}, "nframes .* set data.num_frames"),
        ({"max_pixels": 99}, "max_pixels .* set data.video_max_pixels"),
        ({"video_start": "2"}, "video_start of the video is '2', expected a number"),
        ({"video_end": 9.0}, "which has 2 seconds"),
        ({"video_start": [0, 1]}, "row 1: column video_start has 2 values, and the row has 1 videos"),
        ({"video": {"video": "a.mp4", "video_start": 0.1}, "video_start": 0.2}, "video_start of the video is given"),
    ],
)  # fmt: skip
def test_columns_without_effect_are_refused(columns, message):
    rows = load({"prompt": "?", "image": "a.png", "fps": 30}, {"prompt": "?", "video": "a.mp4"} | columns)
    assert len(rows[0].images) == 1  # nothing belongs to a video there
    with pytest.raises(DataError, match=message):
        check_rows(rows, [], Ranks())
    with pytest.raises(DataError, match=message):
        rows[1]


def test_video_root_is_the_folder_of_relative_paths():
    Path("clips").mkdir()
    Path("a.mp4").rename("clips/a.mp4")
    row = {"prompt": "?", "video": "a.mp4", "image": "a.png"}
    assert len(load(row, video_root="clips")[0].videos) == 1
    Path("a.png").rename("clips/a.png")
    assert len(load(row, image_root="clips")[0].videos) == 1
    with pytest.raises(DataError, match=r"data.video_root none .* videos"):
        load(row, video_root="none")


def test_text_only_refuses_videos():
    with pytest.raises(DataError, match=r"column video .* data.text_only"):
        load({"prompt": "?", "video": "a.mp4"}, text_only=True)[0]


def test_videos_that_nobody_reads_are_refused():
    rows = load({"prompt": "?", "clip": "a.mp4", "video": "a.mp4"})
    with pytest.raises(DataError, match=r"in column clip .* set data.columns: {video: clip}"):
        refuse_unread_media(rows.source, rows.config, "rows", [])
    rows = load({"prompt": "?", "video": "a.mp4"})
    refuse_unread_media(rows.source, rows.config, "rows", [])


VIDEO_R1 = {  # a row of Video-R1-260k.json
    "problem_id": 2, "problem": "What appears on the screen?", "data_type": "video", "problem_type": "multiple choice",
    "options": ["A. A cat.", "B. A title."], "solution": "<answer>B</answer>", "path": "./a.mp4",
    "data_source": "LLaVA-Video-178K/0_30_s_academic_v0_1",
}  # fmt: skip


def test_video_r1():
    still = {"data_type": "image", "path": "a.png", "options": [], "problem_id": 3}
    rows = load(VIDEO_R1, VIDEO_R1 | still)
    assert content(rows) == [VIDEO, text("What appears on the screen?\nOptions:\nA. A cat.\nB. A title.")]
    assert rows[0].columns["solution"] == "<answer>B</answer>"
    assert content(rows, 1) == [IMAGE, text("What appears on the screen?")]
    refuse_unread_media(rows.source, rows.config, "rows", [])


@pytest.mark.parametrize("mark", ["<image>", "<video>"])
def test_llava_marks_a_video_as_an_image(mark):
    turns = [{"from": "human", "value": f"{mark}\nWhat happens?"}, {"from": "gpt", "value": "A cat."}]
    rows = load({"id": "7", "video": "a.mp4", "conversations": turns})
    assert content(rows) == [VIDEO, text("\nWhat happens?")]
    assert rows[0].columns["solution"] == "A cat."


def test_ms_swift():
    messages = [{"role": "user", "content": "<video>Which?"}, {"role": "assistant", "content": "a"}]
    rows = load({"messages": messages, "videos": ["a.mp4"]})
    assert (content(rows), rows[0].columns["solution"]) == ([VIDEO, text("Which?")], "a")


def test_verl():
    row = {
        "data_source": "videos", "prompt": [{"role": "user", "content": "<video>Which?"}],
        "videos": [{"type": "video", "video": f"file://{Path('a.mp4').absolute()}"}],
        "reward_model": {"style": "rule", "ground_truth": "a"},
    }  # fmt: skip
    datasets.Dataset.from_list([row]).to_parquet("train.parquet")
    rows = load_rows(DataConfig(dataset_name="train.parquet"), "train")
    assert (content(rows), rows[0].columns["solution"]) == ([VIDEO, text("Which?")], "a")
    assert len(rows[0].videos) == 1


def test_easyr1():
    rows = load({"problem": "<video>Which?", "answer": "a", "videos": ["a.mp4"]})
    assert (content(rows), rows[0].columns["solution"]) == ([VIDEO, text("Which?")], "a")


def test_encoded_videos_in_a_parquet_file_are_checked_and_read():
    row = {"prompt": "?", "video": {"bytes": Path("a.mp4").read_bytes(), "path": "a.mp4"}}
    datasets.Dataset.from_list([row, row]).to_parquet("train.parquet")
    rows = load_rows(DataConfig(dataset_name="train.parquet", num_frames=4), "train")
    assert len(check_rows(rows, [], Ranks())) == 2
    assert rows[1].videos[0].indices == (0, 16, 33, 49)


def test_bad_videos_are_found_before_the_run():
    Path("half.mp4").write_bytes(Path("a.mp4").read_bytes()[:900])
    videos = ["a.mp4", "half.mp4", "none.mp4", ["a.png", "half.mp4"], {"video": "a.mp4", "nframes": 8}, None]
    rows = load(*({"prompt": "?", "video": video} for video in videos), on_bad_row="drop")
    usable = check_rows(rows, [], Ranks())
    assert usable.indices == [0, 5]
    reasons = {each.record["row"]: each.record["reason"] for each in usable.dropped}
    expected = {
        1: "or its end is missing", 2: "none.mp4: the video cannot be read: [Errno 2]",
        3: "column video, a.png: the video cannot be read: it is an image", 4: "nframes beside the video",
    }  # fmt: skip
    assert reasons.keys() == expected.keys()
    assert all(expected[row] in reasons[row] for row in expected)
    assert all(reason.startswith("train.jsonl, row ") for reason in reasons.values())
    rows = load({"prompt": "?", "video": "a.mp4"}, {"prompt": "?", "video": "none.mp4"})
    with pytest.raises(DataError, match=r"train.jsonl, row 1, column video, none.mp4: the video cannot be read"):
        check_rows(rows, [], Ranks())


def test_a_video_that_changes_after_the_check_is_a_bad_row():
    Path("frames").mkdir()
    for number, pixels in enumerate(moving_frames(5)):
        Image.fromarray(pixels).save(f"frames/{number}.png")
    videos = ["a.mp4", "frames", [f"frames/{number}.png" for number in range(4)]]
    rows = check_rows(load({"prompt": "?", "videos": videos}), [], Ranks()).rows
    expected = rows[0].videos
    os.utime("a.mp4", (1, 1))
    assert [video.digest for video in rows[0].videos] == [video.digest for video in expected]
    kept = Path("a.mp4").read_bytes()
    other = write_video(Path("other.mp4"), 255 - moving_frames(50)).read_bytes()
    Path("a.mp4").write_bytes(other)
    size = "50 frames of 64 × 48 pixels, 2 s"
    message = (
        "train.jsonl, row 0, column videos, a.mp4: the video cannot be read: it has changed since the check before the "
        f"run. Then: {size}, {len(kept)} bytes. Now: {size}, {len(other)} bytes."
    )
    with pytest.raises(DataError, match=re.escape(message)):
        rows[0]
    Path("a.mp4").write_bytes(kept)
    rows[0]
    Image.fromarray(moving_frames(6)[5]).save("frames/5.png")
    with pytest.raises(DataError, match=r"column videos, frames: .* Then: 5 frames .* Now: 6 frames"):
        rows[0]
    Path("frames/5.png").unlink()
    Image.new("RGB", (64, 48)).save("frames/3.png")
    with pytest.raises(DataError, match=r"column videos, frames: .* it has changed"):
        rows[0]


@pytest.mark.parametrize(
    ("wanted", "form", "is_said"), [("auto", "frames", True), ("frames", "frames", False), ("auto", "native", False)]
)
def test_the_run_says_that_it_takes_frames_as_images(
    wanted: str, form: VideoFormat, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = load({"prompt": "?", "video": "a.mp4"}, {"prompt": "?", "image": "a.png"}, video_format=wanted)
    processor = processor_of(build_tiny("qwen2_5_vl", tmp_path / "model"))
    with caplog.at_level("INFO"):
        fitting_rows(check_rows(rows, [], Ranks()), PromptBuilder(processor, rows.config, video_format=form), None)
    lines = [line for line in caplog.messages if "the frames of videos as images" in line]
    assert len(lines) == is_said


def test_the_largest_rows_count_frames():
    """Of 2 s and 10 s, at two frames a second."""
    write_video(Path("long.mp4"), moving_frames(250, 128, 96))
    part = {"video": "long.mp4", "video_start": 2.0, "video_end": 6.0}
    rows = load(*({"prompt": "?", "video": video} for video in ("a.mp4", "long.mp4", part)), num_frames=None)
    usable = check_rows(rows, [], Ranks())
    sizes = [4 * 64 * 48, 20 * 128 * 96, 8 * 128 * 96]
    assert [usable.pixels_of(row) for row in range(3)] == sizes
    assert usable.largest(2) == [1, 2, 0]  # and the two with the longest texts


def test_the_pixels_of_a_row_are_those_that_the_checkpoint_makes():
    """They come from the header alone, and frames that the tower joins count once."""
    write_video(Path("long.mp4"), moving_frames(250, 128, 96))
    rows = load({"prompt": "?", "video": "long.mp4"}, num_frames=None, max_frames=16)
    usable = check_rows(rows, [], Ranks())
    for name in ("Qwen2VL", "Qwen3VL", "Glm46V", "InternVL", "Gemma4"):
        processor = getattr(transformers, f"{name}VideoProcessor")()
        own = replace(usable, rows=usable.rows.with_frames_of(processor))
        video = own.rows[0].videos[0]
        joined = getattr(processor, "temporal_patch_size", None) or 1
        assert own.pixels_of(0) == video.frames[::joined, ..., 0].size, name


def test_a_video_of_which_a_processor_cannot_choose_frames_is_a_bad_row(tmp_path: Path, monkeypatch):
    processor = processor_of(build_tiny("qwen2_5_vl", tmp_path / "model"))
    kind = type(processor.video_processor)
    own = kind.sample_frames

    def sample_frames(self, metadata, **settings):
        if metadata.total_num_frames == 30:
            raise ValueError("too odd")
        return own(self, metadata, **settings)

    monkeypatch.setattr(kind, "sample_frames", sample_frames)
    given = [{"prompt": "?", "video": "a.mp4"}, {"prompt": "?", "videos": ["a.mp4", "b.mp4"]}]
    reason = "train.jsonl, row 1, column videos, b.mp4: the video cannot be read: too odd"
    rows = load(*given, on_bad_row="drop")
    usable = fitting_rows(check_rows(rows, [], Ranks()), PromptBuilder(processor, rows.config), None)
    assert usable.largest(2) == [0]
    assert [each.record["reason"] for each in usable.dropped] == [reason]
    rows = load(*given)
    with pytest.raises(DataError, match=reason):
        fitting_rows(check_rows(rows, [], Ranks()), PromptBuilder(processor, rows.config), None)


def test_frames_are_those_of_the_checkpoints_processor():
    rows = load({"prompt": "?", "video": "a.mp4"}, num_frames=None, fps=4.0, video_max_pixels=20_000)
    video = rows.with_frames_of(transformers.Qwen2VLVideoProcessor())[0].videos[0]
    assert video.indices == (0, 6, 12, 18, 25, 31, 37, 43)
    assert video.frames.shape == (8, 112, 168, 3)
    with pytest.raises(ConfigError, match=r"data.video_max_pixels has no effect"):
        rows.with_frames_of(transformers.Gemma4VideoProcessor())


def test_videos_count_by_their_paths_in_the_fingerprint():
    def fingerprint(video: Any) -> str:
        return data_fingerprint(load({"prompt": "?", "video": video}), [0])

    whole, clip = fingerprint("a.mp4"), {"video": "a.mp4", "video_start": 0.0, "video_end": 1.0}
    assert fingerprint("a.mp4") == whole
    assert len({whole, fingerprint("b.mp4"), fingerprint(clip), fingerprint(clip | {"video_end": 1.5})}) == 4
    assert np.array_equal(load({"prompt": "?", "video": "a.mp4"})[0].videos[0].frames.shape, (4, 48, 64, 3))
