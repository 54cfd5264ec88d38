"""Videos in the content of tools and environments: which frames the model gets, and which videos are refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.video import shown
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.errors import DataError
from rl_vlm.rollout.environments.contract import Content, read_content, with_frames
from rl_vlm.rollout.environments.failures import ToolFailure
from rl_vlm.rollout.environments.processes import packed, unpacked
from rl_vlm.rollout.environments.steps import read_step, step_with_frames
from rl_vlm.types import Video, is_clip
from tests.helpers.video_files import write_video

FRAMES = np.stack([np.full((4, 6, 3), 40 * number, dtype=np.uint8) for number in range(3)])


def arrived(*blocks: dict[str, Any], max_pixels: int = 10**6, **data: Any) -> Content:
    """Content as a tool's result has it, after it was sent by another process."""
    found = read_content(list(blocks), max_pixels)
    assert unpacked(packed(found)) == found
    content = with_frames(found, FrameRule(DataConfig(**data)))
    assert content is not None
    return content


def clip(video: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "video", "video": video, **fields}


def levels(video: Video) -> list[int]:
    return video.frames[:, 0, 0, 0].tolist()


def only(content: Content) -> Video:
    (file,) = content.images
    return Video.decoded(file)


def video_file(folder: Path, num_frames: int = 50) -> Path:
    """Two seconds in a file, whose level of grey is 5 times the number of a frame."""
    grey = [np.full((32, 32, 3), 5 * number, np.uint8) for number in range(num_frames)]
    return write_video(folder / "clip.mp4", np.stack(grey))


@pytest.mark.parametrize("frames", [FRAMES, [Image.fromarray(each) for each in FRAMES], list(FRAMES)])
def test_all_frames_are_shown_at_their_rate(frames: Any):
    found = arrived({"type": "text", "text": "You moved."}, clip(frames, fps=4), {"type": "image", "image": FRAMES[1]})
    assert [block["type"] for block in found.blocks] == ["text", "video", "image"]
    first, second = found.images
    assert is_clip(first) and not is_clip(second)
    video = Video.decoded(first)
    assert (levels(video), video.times, video.fps) == ([0, 40, 80], [0.0, 0.25, 0.5], 4.0)
    assert (video.total_num_frames, video.duration) == (3, 0.75)
    assert Image.open(io.BytesIO(second)).getpixel((0, 0)) == (40, 40, 40)


def test_frames_of_a_folder_have_two_a_second_and_a_part_keeps_its_times(tmp_path: Path):
    for number, frame in enumerate(FRAMES):
        Image.fromarray(frame).save(tmp_path / f"{number + 8}.png")
    video = only(arrived(clip(str(tmp_path))))
    assert (levels(video), video.times) == ([0, 40, 80], [0.0, 0.5, 1.0])
    part = only(arrived(clip(str(tmp_path), video_start=0.5)))
    assert (levels(part), part.times) == ([40, 80], [0.5, 1.0])


def test_settings_of_frames_do_not_choose_among_given_ones():
    video = only(arrived(clip(np.repeat(FRAMES, 20, axis=0)), num_frames=4, max_frames=4, min_frames=4))
    assert len(video.frames) == 60


def test_frames_are_resized_to_the_limits_of_the_settings():
    assert only(arrived(clip(FRAMES), video_max_pixels=6)).frames.shape == (3, 2, 3, 3)
    assert only(arrived(clip(FRAMES), video_total_pixels=18)).frames.shape == (3, 2, 3, 3)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_frames_of_a_file_are_chosen_as_those_of_a_row(as_bytes: bool, tmp_path: Path):
    """Four of 50 frames at even distances, as `np.linspace(0, 49, 4)` has them, and of a part of the file."""
    path = video_file(tmp_path)
    value = path.read_bytes() if as_bytes else str(path)
    video = only(arrived(clip(value), num_frames=4))
    assert video.indices == (0, 16, 33, 49) and video.fps == 25.0
    assert np.abs(np.array(levels(video)) - 5 * np.array(video.indices)).max() <= 3
    part = only(arrived(clip(value, video_start=0.4, video_end=0.8), num_frames=4))
    assert part.indices == (10, 13, 16, 19)


def test_what_has_arrived_does_not_change(tmp_path: Path):
    frames, path = FRAMES.copy(), video_file(tmp_path)
    found = read_content([clip(frames), clip(str(path))], 10**6)
    frames[:] = 255
    path.unlink()
    content = with_frames(found, FrameRule(DataConfig(num_frames=4)))
    assert content is not None
    shown_frames, shown_file = map(Video.decoded, content.images)
    assert levels(shown_frames) == [0, 40, 80] and shown_file.indices == (0, 16, 33, 49)


def test_equal_clips_have_equal_files_and_other_rates_another_one():
    files = [arrived(clip(FRAMES, fps=fps)).images[0] for fps in (2, 2.0, 3)]
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (clip("a.mp4"), DataError, "a video of the environment, a.mp4: .*No such file"),
        (clip(np.zeros((65, 2, 2, 3), np.uint8)), DataError, "it has 65 frames, more than 64"),
        (clip(np.zeros((2, 20, 20, 3), np.uint8)), DataError, "20 × 20 = 400 pixels are more than"),
        (clip(np.zeros((2, 2, 2, 3))), DataError, "expected uint8"),
        (clip([FRAMES[0], FRAMES[0][:2]]), DataError, "The frames of a video have one size"),
        (clip([]), DataError, "its list of frames is empty"),
        (clip(3), DataError, "found a int"),
        (clip(FRAMES, nframes=2), DataError, "nframes .* set data.num_frames"),
        (clip("https://x.org/a.mp4"), DataError, "URLs are not fetched"),
        (clip(None), ValueError, "a block of type 'video' has no text, image or video"),
    ],
)  # fmt: skip
def test_videos_that_are_refused(block: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        read_content([block], 100)


@pytest.mark.parametrize(("fields", "message"), [
    ({"fps": 4}, "fps .* set data.fps"),
    ({"video_start": 3}, "which has 2 seconds"),
])  # fmt: skip
def test_files_that_are_refused_name_the_file(fields: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(DataError, match=f"a video of the environment, .*clip.mp4: .*{message}"):
        arrived(clip(str(video_file(tmp_path)), **fields))


def test_broken_files_name_themselves_and_fail_their_step_alone(tmp_path: Path):
    path = video_file(tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    rule = FrameRule(DataConfig())
    with pytest.raises(DataError, match=r"clip\.mp4: the video cannot be read: .* no video"):
        with_frames(read_content([clip(str(path))], 10**6), rule)
    step = read_step(([clip(str(path))], 1.0, False, {}), 10**6)
    with pytest.raises(ToolFailure, match=r"`step` returned what cannot be read: .*clip\.mp4"):
        step_with_frames(step, rule)


def test_a_file_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shown, "MOST_BYTES", 2**20)
    path = tmp_path / "large.mp4"
    path.write_bytes(bytes(2**20 + 1))
    with pytest.raises(DataError, match=r"large\.mp4: .*the file has more than 1 MiB"):
        read_content([clip(str(path))], 100)
