"""The reward check reads the frames that the run takes, and holds no pixels of videos."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch import cli
from rl_vlm.config.schema import DataConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.samples import load_rows
from rl_vlm.tools.checks.diagnosis import Checking, collect
from rl_vlm.tools.checks.rewards.trial import read_samples
from rl_vlm.types import Sample, VideoFormat
from tests.helpers.builders import processor_of
from tests.helpers.video_files import moving_frames, write_video
from tests.tiny.build import build_tiny

SEEN: list[dict[str, Any]] = []


def watched(completions: list[Any], solution: list[str], video_frame_times: Any, images: Any) -> list[float]:
    SEEN.append({"times": video_frame_times[0], "images": len(images[0])})
    return [float(gold in str(one)) for one, gold in zip(completions, solution, strict=True)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_video(tmp_path / "a.mp4", moving_frames(100))
    rows = [{"prompt": "When?", "video": "a.mp4", "solution": str(i)} for i in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    build_tiny("qwen2_5_vl", tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("command", [["rewards", "check"], ["doctor", "--no-model"]], ids=" ".join)
@pytest.mark.parametrize(
    ("video_format", "times"),
    [("native", [0.0, 1.0, 2.0, 3.0]), ("frames", [0.0, 1.32, 2.64, 3.96])],
)
def test_frames_are_those_of_the_run(
    folder: Path, video_format: VideoFormat, times: list[float], command: list[str], capsys: pytest.CaptureFixture[str]
):
    """Qwen's rule takes every 25th frame. Frames that are images have even distances, and are no images of the row."""
    (folder / "run.yaml").write_text(
        f"model: {{model_name_or_path: {folder / 'model'}}}\n"
        f"data: {{dataset_name: {folder / 'train.jsonl'}, num_frames: 4, video_format: {video_format}}}\n"
        f"rewards: {{reward_funcs: [{__name__}:watched]}}\ntrain: {{prompts_per_step: 2, output_dir: {folder / 'o'}}}\n"
        "rollout: {engine: hf}\n"
    )
    SEEN.clear()
    assert cli.main([*command, str(folder / "run.yaml")]) in (0, 1)
    assert SEEN[0]["times"] == [pytest.approx(times)] and SEEN[0]["images"] == 0


def test_pixels_of_videos_are_not_held(folder: Path):
    data = DataConfig(dataset_name=str(folder / "train.jsonl"), num_frames=4)
    builder = PromptBuilder(processor_of(folder / "model"), data)
    samples: list[Sample] = []

    def read() -> Checking[None]:
        rows = load_rows(data, "train").with_frames_of(builder.video_processor)
        samples.extend((yield from read_samples(rows, 3, builder))[1])

    assert collect(read()).findings == []
    assert [sample.videos[0].frames.shape for sample in samples] == [(4, 48, 64, 3)] * 3
    assert all(
        sample.videos[0].frames.base is not None and not sample.videos[0].frames.strides[0] for sample in samples
    )
