"""Errors of the machine do not count as bad rows, neither of images nor of videos."""

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.check import check_rows
from rl_vlm.data.media import media_errors, path_label
from rl_vlm.data.problems import LARGE_VIDEO, MISSING_IMAGE, UNREADABLE_VIDEO
from rl_vlm.data.samples import load_rows, row_errors
from rl_vlm.data.video.source import TooLong
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import ConfigError, DataError, RLVLMError, TrainingError


def raised(error: BaseException, kind: Any = "video", value: Any = "a.mp4") -> BaseException:
    with pytest.raises(RLVLMError) as found, media_errors(kind, value, "row 3"):
        raise error
    return found.value


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_errors_of_the_machine(kind, number):
    found = raised(OSError(number, os.strerror(number), "a.mp4"), kind)
    assert isinstance(found, TrainingError)
    assert str(found).startswith(f"row 3, a.mp4: the {kind} cannot be read: [Errno {number}] {os.strerror(number)}")


def test_no_memory():
    found = raised(MemoryError())
    assert isinstance(found, TrainingError)
    assert str(found) == "row 3, a.mp4: the video cannot be read: no memory is left. The file may be good."


@pytest.mark.parametrize(
    "error, kind, problem",
    [
        (FileNotFoundError(2, "No such file"), "image", MISSING_IMAGE), (TooLong("9 s"), "video", LARGE_VIDEO),
        (PermissionError(13, "Permission denied"), "video", UNREADABLE_VIDEO),
        (KeyError("a"), "video", UNREADABLE_VIDEO),
        (OSError("image file is truncated"), "video", UNREADABLE_VIDEO),
    ],
)  # fmt: skip
def test_errors_of_a_file(error, kind, problem):
    found = raised(error, kind)
    assert isinstance(found, DataError) and found.problem == problem
    assert str(found) == f"row 3, a.mp4: the {kind} cannot be read: {error}"


def test_an_error_of_a_frame_keeps_its_problem_and_one_of_a_setting_its_class():
    inner = DataError("frame 1, b.png: none", MISSING_IMAGE)
    found = raised(inner, "video", {"video": "clips"})
    assert str(found) == "row 3, clips: frame 1, b.png: none"
    assert isinstance(found, DataError) and found.problem == MISSING_IMAGE
    assert isinstance(raised(ConfigError("install it")), ConfigError)


def test_labels_have_the_path():
    assert path_label({"video": {"path": "a.mp4", "bytes": b"1"}}) == ", a.mp4"
    assert [path_label(value) for value in (b"1", {"bytes": b"1"}, "data:image/png;base64,AAAA", ["a"])] == [""] * 4


def test_too_many_open_files_end_the_check_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("a.png")
    Path("train.jsonl").write_text('{"prompt": "?", "image": "a.png"}\n')
    rows = load_rows(DataConfig(dataset_name="train.jsonl", on_bad_row="drop"), "train")
    assert check_rows(rows, [], Ranks()).indices == [0]  # imports modules
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("a.png", os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 8, limits[1]))
        with pytest.raises(OSError):
            while True:
                held.append(os.dup(held[0]))
        with pytest.raises(TrainingError, match=r"row 0, column image, a.png: the image cannot be read: \[Errno 24\]"):
            check_rows(rows, [], Ranks())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in held:
            os.close(number)


def test_a_row_that_does_not_fit_in_memory_is_no_bad_row():
    with pytest.raises(TrainingError, match="row 3: it cannot be read: MemoryError"), row_errors("row 3"):
        raise MemoryError
    with pytest.raises(DataError, match="row 3: it cannot be read: KeyError"), row_errors("row 3"):
        raise KeyError
