"""Video files, bytes, lists and folders of frames, arrays and animations, as the frames that a row gives."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.video_utils import VideoMetadata

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.images import png_bytes
from rl_vlm.data.problems import LARGE_VIDEO, MISSING_VIDEO, UNREADABLE_VIDEO
from rl_vlm.data.video.container import indexed_packets, read_packets
from rl_vlm.data.video.files import MissedFrame, VideoFile
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.data.video.read import check_video, read_video, video_digest
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.types import Video
from tests.helpers.bad_videos import bad_videos
from tests.helpers.video_files import copy_packets, moving_frames, write_video

FRAMES = moving_frames(50)
PROBLEM_OF = {"missing": MISSING_VIDEO, "another protocol": MISSING_VIDEO, "too long": LARGE_VIDEO,
              "GIF of many pixels": LARGE_VIDEO}  # fmt: skip
SIX = [0, 10, 20, 29, 39, 49]


def rule(**settings: Any) -> FrameRule:
    given: dict[str, Any] = {"num_frames": 6}
    return FrameRule(DataConfig(**given | settings))


def read(value: Any, folder: Path = Path(), **settings: Any) -> Video:
    return read_video(value, folder, rule(**settings), "row 3, column video")


def difference(found, numbers):
    return np.abs(found.astype(int) - FRAMES[numbers]).mean()


def taken(decoded: Iterator[np.ndarray | None]) -> np.ndarray:
    return np.stack([pixels for pixels in decoded if pixels is not None])


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv", ".webm", ".avi", ".ts"])
def test_frames_of_a_file_are_found_by_seeking_with_the_pixels_of_the_sequence(tmp_path, suffix):
    path = write_video(tmp_path / f"a{suffix}", FRAMES)
    video = read(path.name, tmp_path)
    assert (list(video.indices), video.fps, video.total_num_frames, video.duration) == (SIX, 25.0, 50, 2.0)
    with path.open("rb") as file:
        source = VideoFile(file, 10**6)
        in_sequence = taken(source.in_sequence(SIX))
        if suffix != ".ts":  # whose seeks land after the frame
            assert np.array_equal(taken(source.by_seeking(SIX, source.packets)), in_sequence)
    assert np.array_equal(video.frames, in_sequence)
    assert 2 * difference(video.frames, SIX) < difference(video.frames, [1, 11, 21, 30, 40, 48])
    assert rule().num_pixels(check_video(path.name, tmp_path, rule(), "")) == 6 * 64 * 48


def nearest(path: Path, frames: np.ndarray) -> list[int]:
    """Read each frame of a file alone, and return the number of the given frame that it resembles most."""
    with path.open("rb") as file:
        source = VideoFile(file, 10**6)
        found = [next(iter(source.read([number]))).astype(int) for number in range(len(frames))]
    return [int(np.abs(frames.astype(int) - each).mean((1, 2, 3)).argmin()) for each in found]


@pytest.mark.parametrize("copied", [None, ".mkv", ".mp4", ".ts"])
def test_times_of_decoding_are_not_those_at_which_frames_are_shown(tmp_path, copied):
    """An AVI has no times, and a copy of its packets has the times of decoding."""
    frames = np.concatenate([FRAMES, 255 - FRAMES[:30]])
    path = write_video(tmp_path / "a.avi", frames, codec="h264", b_frames=3)
    path = path if copied is None else copy_packets(path, tmp_path / f"b{copied}")
    assert nearest(path, frames) == list(range(80))
    video = read(path)
    assert (video.fps, video.total_num_frames, video.duration) == (25.0, 80, 3.2)


def test_a_decoder_that_starts_after_the_key_frame_is_not_trusted(tmp_path):
    """The decoder of mpeg4 makes grey frames then."""
    path = write_video(tmp_path / "a.ts", FRAMES[:40], codec="mpeg4", b_frames=3)
    assert nearest(path, FRAMES[:40]) == list(range(40))


def test_a_missed_seek_falls_back_to_the_sequence(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", FRAMES)
    expected = read(path).frames

    def missed(source, numbers, packets):
        yield from source.in_sequence(numbers[:2])
        raise MissedFrame

    monkeypatch.setattr(VideoFile, "by_seeking", missed)
    with path.open("rb") as file:
        assert np.array_equal(np.stack(list(VideoFile(file, 10**6).read(SIX))), expected)


def test_bytes_an_open_file_and_dicts_are_read(tmp_path):
    path = write_video(tmp_path / "a.mp4", FRAMES)
    expected = read(path).frames
    content = path.read_bytes()
    for value in (content, {"bytes": content, "path": "b.mp4"}, {"bytes": None, "path": str(path)}, f"file://{path}",
                  {"video": {"video": str(path)}, "video_start": None}):  # fmt: skip
        assert np.array_equal(read(value).frames, expected)
    with path.open("rb") as file:
        assert np.array_equal(read(file).frames, expected)


@pytest.mark.parametrize(
    "suffix, settings, is_indexed",
    [
        (".mp4", {}, True), (".mov", {}, True), (".mp4", {"options": {"movflags": "faststart"}}, True),
        (".mp4", {"codec": "mpeg4"}, True), (".mp4", {"milliseconds": range(0, 6000, 40)}, True),
        (".mp4", {"milliseconds": [40 * n + n % 7 for n in range(150)]}, False),
        (".mp4", {"codec": "libx265", "key_every": 25}, False),  # frames are shown before the key frame they follow
        (".mp4", {"options": {"movflags": "frag_keyframe+empty_moov"}}, False),
        (".mkv", {}, False), (".avi", {}, False),
    ],
)  # fmt: skip
def test_an_index_tells_the_packets_of_a_file(tmp_path, suffix, settings, is_indexed):
    path = write_video(tmp_path / f"a{suffix}", moving_frames(150), **settings)
    with path.open("rb") as file:
        source = VideoFile(file, 10**6)
        with source.opened() as (container, stream):
            found = indexed_packets(container, stream)
        assert (found is not None) == is_indexed
        with source.opened() as (container, stream):
            expected = read_packets(container, stream)
        for packets in (source.packets, found or expected):
            assert packets.timeline == expected.timeline
            assert packets.pts is not None and expected.pts is not None
            assert np.array_equal(packets.pts, expected.pts) and np.array_equal(packets.keys, expected.keys)


def test_a_clip_has_the_times_of_its_file(tmp_path):
    path = write_video(tmp_path / "a.mp4", FRAMES)
    video = read({"video": str(path), "video_start": 0.4, "video_end": 1.2}, num_frames=5)
    assert list(video.indices) == [10, 15, 20, 24, 29]
    assert video.times == [0.4, 0.6, 0.8, 0.96, 1.16]
    assert (video.total_num_frames, video.duration) == (20, 2.0)
    assert VideoMetadata(**video.metadata).sampled_fps == 6.25  # five frames in 0.8 s


@pytest.mark.parametrize("suffix", [".mkv", ".mp4"])
def test_frames_without_a_constant_rate_have_a_clock_of_milliseconds(tmp_path, suffix):
    times = [0, 40, 80, 500, 540, 2000, 2040, 2080, 5000, 5040]
    path = write_video(tmp_path / f"a{suffix}", FRAMES[:10], milliseconds=times)
    video = read(path, num_frames=None, min_frames=16)
    assert (list(video.indices), video.fps) == (times, 1000)
    assert video.times[-1] == 5.04


@pytest.mark.parametrize("flags", ["frag_keyframe", "frag_keyframe+faststart", "frag_keyframe+empty_moov", "dash"])
def test_the_frames_of_all_fragments_are_counted(tmp_path, flags):
    """Without an empty header, it has the ten frames before the first fragment."""
    path = write_video(tmp_path / "a.mp4", FRAMES[:40], options={"movflags": flags})
    header = check_video(path, Path(), rule(), "").header
    assert (header.num_frames, round(header.duration, 1)) == (40, 1.6)
    assert read(path).total_num_frames == 40


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
@pytest.mark.parametrize("b_frames", [0, 3])
def test_a_gap_between_frames_does_not_make_the_video_longer(tmp_path, suffix, b_frames):
    times = [*range(0, 800, 40), *range(8800, 9600, 40)]
    path = write_video(tmp_path / f"a{suffix}", FRAMES[:40], milliseconds=times, b_frames=b_frames)
    assert (read(path).duration, check_video(path, Path(), rule(), "").header.duration) == (9.6, 9.6)


def test_frames_are_turned_as_the_file_says(tmp_path):
    frames = np.zeros((6, 48, 64, 3), np.uint8)
    frames[:, :10, :20] = 255  # the corner at the top left
    for angle, corner, shape in ((90, (-3, 2), (64, 48)), (180, (-3, -3), (48, 64)), (270, (2, -3), (64, 48))):
        found = read(write_video(tmp_path / f"{angle}.mp4", frames, rotation=angle)).frames[0]
        assert found.shape[:2] == shape
        assert [found[y, x, 0] > 128 for y, x in ((2, 2), (2, -3), (-3, 2), (-3, -3))].count(True) == 1
        assert found[corner][0] > 128


def test_bad_files_are_refused_with_their_reason(tmp_path):
    for way, (value, message) in bad_videos(tmp_path).items():
        with pytest.raises(DataError, match=message) as error:
            read(value, tmp_path)
        place = f"row 3, column video, {value}: " if isinstance(value, str) else "row 3, column video"
        assert str(error.value).startswith(place)
        assert error.value.problem == PROBLEM_OF.get(way, UNREADABLE_VIDEO)


def test_the_header_shows_all_bad_files_but_the_one_that_is_damaged_inside(tmp_path):
    values, found = bad_videos(tmp_path), set()
    for way, (value, _) in values.items():
        try:
            check_video(value, tmp_path, rule(), "")
        except DataError:
            found.add(way)
    assert found == set(values) - {"damaged inside"}


def test_another_video_than_the_name_says_is_read(tmp_path):
    content = write_video(tmp_path / "a.webm", FRAMES).read_bytes()
    (tmp_path / "b.mp4").write_bytes(content)
    assert list(read("b.mp4", tmp_path).indices) == SIX


def test_sizes_and_lengths_are_limited_before_a_frame_is_decoded(tmp_path):
    path = write_video(tmp_path / "a.mp4", FRAMES)
    far = write_video(tmp_path / "far.mp4", moving_frames(900, 16, 16), key_every=10**6)
    cases: tuple[tuple[Path, dict[str, Any], str], ...] = (
        (path, {"max_image_pixels": 3071}, r"64 × 48 = 3072 pixels .* data.max_image_pixels = 3071"),
        (path, {"max_video_seconds": 1.9}, r"2 s are more than data.max_video_seconds = 1.9"),
        (far, {"num_frames": 4}, r"900 frames would have to be decoded, over 200 for each"),
    )
    for value, settings, message in cases:
        with pytest.raises(DataError, match=message) as error:
            read(value, **settings)
        assert error.value.problem == LARGE_VIDEO
    for value, settings, message in cases[:2]:
        with pytest.raises(DataError, match=message):
            check_video(value, Path(), rule(**settings), "")
    assert len(read({"video": str(path), "video_end": 1.5}, max_video_seconds=1.9).indices) == 6


@pytest.mark.parametrize("interval", [(0.5, 0.5), (2.0, 2.5), (0.0, 3.1)])
def test_a_clip_outside_of_the_video_is_refused(tmp_path, interval):
    path = write_video(tmp_path / "a.mp4", FRAMES)
    value = {"video": str(path), "video_start": interval[0], "video_end": interval[1]}
    for reads in (read_video, check_video):
        with pytest.raises(DataError, match="do not select a part of the video, which has 2 seconds"):
            reads(value, Path(), rule(), "")


@pytest.mark.parametrize(
    "key, setting",
    [("nframes", "num_frames"), ("max_pixels", "video_max_pixels"), ("total_pixels", "video_total_pixels")],
)
def test_settings_of_one_video_are_refused(key, setting):
    with pytest.raises(DataError, match=f"{key} beside the video would have no effect; set data.{setting}"):
        read({"video": "a.mp4", key: 4})


def test_fps_beside_a_file_is_refused(tmp_path):
    path = str(write_video(tmp_path / "a.mp4", FRAMES))
    with pytest.raises(DataError, match=r"fps beside a video file would have no effect; set data.fps"):
        read({"video": path, "fps": 2})


def test_lists_folders_and_arrays_of_frames_are_read(tmp_path, caplog):
    folder = tmp_path / "frames"
    folder.mkdir()
    for number, pixels in enumerate(FRAMES[:12]):
        Image.fromarray(pixels).save(folder / f"{number}.png")  # 10.png is after 9.png
    (folder / "notes.txt").write_text("not a frame")
    paths = [f"frames/{number}.png" for number in range(12)]
    images = [Image.fromarray(pixels) for pixels in FRAMES[:12]]
    for value in ("frames", paths, images, list(map(png_bytes, images)), FRAMES[:12]):
        video = read({"video": value, "fps": 4}, tmp_path, num_frames=4)
        assert np.array_equal(video.frames, FRAMES[[0, 4, 7, 11]])
        assert (video.times, video.duration) == ([0, 1, 1.75, 2.75], 3)
        header = check_video({"video": value, "fps": 4}, tmp_path, rule(num_frames=4), "")
        assert rule(num_frames=4).num_pixels(header) == 4 * 64 * 48
    with caplog.at_level("INFO"):
        assert read(FRAMES[:12]).fps == 2
    assert "frames that are given without `fps` have 2 frames per second" in caplog.text


def test_the_digest_of_a_large_file_is_of_its_blocks(tmp_path):
    def digest(content: bytes, **clip: Any) -> bytes:
        (tmp_path / "a.mp4").write_bytes(content)
        return video_digest({"video": "a.mp4", **clip}, tmp_path, "")

    content = bytes(range(256)) * 2**14  # 4 MB
    first = digest(content)
    assert video_digest(content, tmp_path, "") == first
    assert (
        digest(content[:-1]) != first and digest(content[:-1] + b"x") != first and digest(b"x" + content[1:]) != first
    )
    assert digest(content, video_start=1.0) != first
    middle = len(content) // 15 // 2 + 2**15  # between the first two blocks of 16
    assert digest(content[:middle] + b"x" + content[middle + 1 :]) == first
    small = b"a" * 100_000
    assert digest(small) != digest(small[:50_000] + b"b" + small[50_001:])


def test_frames_of_unequal_sizes_and_other_arrays_are_refused(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    Image.new("RGB", (6, 8)).save(tmp_path / "b.png")
    for reads in (read_video, check_video):
        with pytest.raises(DataError, match="frame 1 has 6 × 8 pixels, and the first has 8 × 6"):
            reads(["a.png", "b.png"], tmp_path, rule(), "")
    with pytest.raises(DataError, match=r"found an array of float64 with shape \(2, 3, 4, 3\), expected uint8"):
        read(np.zeros((2, 3, 4, 3)))
    with pytest.raises(DataError, match=r"frame 1, none.png: the image cannot be read"):
        read(["a.png", "none.png"], tmp_path)


@pytest.mark.parametrize("suffix", ["gif", "webp"])
def test_animations_are_read(tmp_path, suffix):
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250), (250, 0, 250)]
    images = [Image.new("RGB", (16, 12), colour) for colour in colours]
    path = tmp_path / f"a.{suffix}"
    images[0].save(path, save_all=True, append_images=images[1:], duration=40, lossless=True)
    video = read(path)
    assert (list(video.indices), video.fps, video.duration) == ([0, 1, 2, 3, 4, 5], 25, 0.24)
    assert [tuple(frame[0, 0].tolist()) for frame in video.frames] == colours
    images[0].save(path, save_all=True, append_images=images[1:], duration=[40, 40, 400, 40, 40, 40], lossless=True)
    assert read(path, num_frames=None, min_frames=9).times == [0, 0.04, 0.08, 0.48, 0.52, 0.56]


@pytest.mark.parametrize("suffix", ["gif", "webp"])
def test_the_header_of_an_animation_tells_its_length(tmp_path, suffix):
    images = [Image.fromarray(pixels) for pixels in FRAMES[:10]]
    path = tmp_path / f"a.{suffix}"
    lengths = [1000, 500, 0, 70, 1000, 2000, 1000, 1000, 1000, 1000]  # 0 is shown for 100 ms
    images[0].save(path, save_all=True, append_images=images[1:], duration=lengths, comment=b"c" * 300)
    clip = {"video": str(path), "video_start": 6.0, "video_end": 9.0}
    shown = check_video(clip, Path(), rule(), "")
    assert shown.header == (64, 48, 10, 8.67)
    assert rule(num_frames=None).num_pixels(shown) == 4 * 64 * 48  # of ten frames in 8.67 s
    video = read(clip, num_frames=None)
    assert (video.times, video.duration) == ([5.67, 6.67, 7.67], 8.67)
    assert read(path, num_frames=None, min_frames=16).times == [0, 1, 1.5, 1.6, 1.67, 2.67, 4.67, 5.67, 6.67, 7.67]
    with pytest.raises(DataError, match=r"do not select a part of the video, which has 8.67 seconds"):
        check_video(clip | {"video_end": 9.7}, Path(), rule(), "")
    with pytest.raises(DataError, match=r"8.67 s are more than data.max_video_seconds = 8.6"):
        check_video(path, Path(), rule(max_video_seconds=8.6), "")


def test_without_pyav_files_are_refused_and_frames_are_read(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", FRAMES)
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[video\]'"):
        read(path)
    assert read(FRAMES).frames.shape == (6, 48, 64, 3)


def test_a_video_that_is_not_decoded_has_the_times_and_sizes_of_one_that_is(tmp_path: Path):
    write_video(tmp_path / "a.mp4", moving_frames(100))
    given = rule(num_frames=4)
    whole, black = (read_video("a.mp4", tmp_path, given, "row 3", decode=decode) for decode in (True, False))
    assert (black.times, black.duration, black.frames.shape) == (whole.times, whole.duration, whole.frames.shape)
    assert whole.frames.any() and not black.frames.any()
