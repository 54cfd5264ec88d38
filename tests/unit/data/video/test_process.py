"""Decoders in processes: one that hangs in C, crashes or uses all memory is a bad row, and nothing else."""

import ctypes
import errno
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rewards.process import Answerer
from rl_vlm.config.schema import DataConfig
from rl_vlm.data.problems import UNREADABLE_VIDEO
from rl_vlm.data.video.files import VideoFile
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.data.video.process import Decoder, Decoders, KnownFile, load_decoder
from rl_vlm.data.video.read import check_video, read_video
from rl_vlm.errors import DataError, TrainingError
from tests.helpers.video_files import moving_frames, write_video

FRAMES = moving_frames(50)
RULE = FrameRule(DataConfig(num_frames=6))


def hang() -> None:
    ctypes.PyDLL(None).sleep(1000)  # in C, with the interpreter's lock


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_memory() -> None:
    while True:
        held.append(b"x" * 2**24)


def raise_error(error: Exception) -> None:
    raise error


held: list[bytes] = []


class Faulty(Decoder):
    """Fails after the first frame of a file with "bad" in its name, or at its header with "worse"."""

    fault: Callable[[], None]

    def open(self, source: Any, max_pixels: int) -> Iterator[bytes]:
        self.source = source
        if "worse" in str(source):
            self.fault()
        return super().open(source, max_pixels)

    def frames(self, numbers: Sequence[int]) -> Iterator[bytes]:
        for reply in super().frames(numbers):
            yield reply
            if "bad" in str(self.source):
                self.fault()


def load_faulty(fault: Callable[[], None]) -> Answerer:
    found = Faulty()
    found.fault = fault
    return found.answer


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Decoders]]:
    """Makes rows read videos with other decoders."""
    made = []

    def use(load: Callable[[], Answerer], seconds: float = 60.0, max_bytes: int = 2**32) -> Decoders:
        made.append(Decoders(1, load, seconds, max_bytes))
        monkeypatch.setattr("rl_vlm.data.video.read.decoders", made[-1])
        return made[-1]

    yield use
    for process in (process for each in made for process in each.idle):
        process.kill()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("good", "bad", "worse"):
        write_video(tmp_path / f"{name}.mp4", FRAMES)
    return tmp_path


def read(folder: Path, name: str) -> np.ndarray:
    return read_video(f"{name}.mp4", folder, RULE, "row 3").frames


def problem(folder: Path, name: str, kind: type[Exception] = DataError) -> str:
    with pytest.raises(kind) as error:
        read(folder, name)
    assert not isinstance(error.value, DataError) or error.value.problem == UNREADABLE_VIDEO
    return str(error.value).removeprefix(f"row 3, {name}.mp4: the video cannot be read: ")


@pytest.mark.parametrize(
    "fault, seconds, max_bytes, message",
    [
        (hang, 1.0, 2**32, "its decoder hangs: it has sent nothing for 1 s."),
        pytest.param(
            crash, 60.0, 2**32, "its decoder crashed: it ended with signal 11 (SIGSEGV).", marks=pytest.mark.ci
        ),
        pytest.param(fill_memory, 60.0, 2**29, "GiB of memory and was killed.", marks=pytest.mark.ci),
    ],
)
@pytest.mark.ci
def test_a_decoder_that_hangs_or_crashes_is_a_bad_row(files, use, fault, seconds, max_bytes, message):
    use(partial(load_faulty, fault), seconds, max_bytes)
    expected = read(files, "good")
    begin = time.monotonic()
    assert message in problem(files, "bad")
    assert time.monotonic() - begin < 15
    assert np.array_equal(read(files, "good"), expected)
    if fault is hang:
        with pytest.raises(DataError, match=r"worse\.mp4: the video cannot be read: its decoder hangs"):
            check_video("worse.mp4", files, RULE, "row 3")


@pytest.mark.ci
def test_a_decoder_that_others_kill_is_no_bad_row(files, use):
    use(partial(load_faulty, be_killed))
    assert "was killed. The system may have run out of memory" in problem(files, "bad", TrainingError)


@pytest.mark.ci
@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error")])
def test_errors_of_the_machine_in_a_decoder_are_no_bad_rows(files, use, error):
    use(partial(load_faulty, partial(raise_error, error)))
    problem(files, "bad", TrainingError)
    use(partial(load_faulty, partial(raise_error, OSError("of FFmpeg"))))
    assert problem(files, "worse") == "of FFmpeg"


@pytest.mark.ci
def test_a_machine_that_starts_no_decoder_is_no_bad_row(files, use):
    use(partial(raise_error, ValueError("no")))
    assert "no process that reads videos could be started: no" in problem(files, "good", TrainingError)


def test_a_decoder_is_used_again_after_errors_and_not_after_half_of_its_replies(files, use):
    used = use(load_decoder)
    read(files, "good")
    (first,) = used.idle
    (files / "text.mp4").write_text("not a video")
    for _ in range(2):
        problem(files, "text")
    with pytest.raises(DataError, match=r"2 s are more than"):
        check_video("good.mp4", files, FrameRule(DataConfig(max_video_seconds=1)), "")
    assert used.idle == [first]
    with used.open(str(files / "good.mp4"), 10**6) as file:
        next(file.read([0, 10, 20]))
    assert used.idle == [] and not first.is_running


def test_bytes_have_the_frames_of_their_file(files, use):
    use(load_decoder)
    content = (files / "good.mp4").read_bytes()
    assert np.array_equal(read_video(content, files, RULE, "").frames, read(files, "good"))


def test_packets_are_read_again_only_if_the_file_has_changed(files, monkeypatch):
    calls = []
    given = VideoFile.packets.func
    monkeypatch.setattr(VideoFile.packets, "func", lambda file: calls.append(1) or given(file))

    known: OrderedDict[Any, Any] = OrderedDict()

    def timeline(name: str) -> int:
        with (files / f"{name}.mp4").open("rb") as file:
            return len(KnownFile(file, 10**6, known).timeline.ticks)

    assert [timeline("good"), timeline("good"), len(calls)] == [50, 50, 1]
    write_video(files / "good.mp4", FRAMES[:30])
    assert [timeline("good"), len(calls)] == [30, 2]
    monkeypatch.setattr("rl_vlm.data.video.process.KNOWN_FRAMES", 90)
    assert [timeline("bad"), len(known), timeline("worse"), len(known)] == [50, 2, 50, 1]


def test_signs_of_life_are_no_frames(files):
    """From the first key frame to the last frame of ten, nine are not taken; a sign comes after every 20."""
    with (files / "good.mp4").open("rb") as file:
        found = list(VideoFile(file, 10**6).decoded([9, 19, 29, 39, 49]))
    assert [pixels is None for pixels in found] == ([True] * 9 + [False]) * 5


def test_no_decoder_outlives_its_owner(files, use):
    others = psutil.Process().children(recursive=True)
    used = use(load_decoder)
    read(files, "good")
    children = [process for process in psutil.Process().children(recursive=True) if process not in others]
    assert len(children) == 2  # the decoder and its supervisor
    used.idle[0].kill()
    assert not psutil.wait_procs(children, timeout=5)[1]
