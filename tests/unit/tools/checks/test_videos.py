"""What the doctor says of videos: frames and tokens, and whether pixels and their order reach the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_vlm.config.schema import DataConfig
from rl_vlm.data import prompts
from rl_vlm.data.check import UsableRows, check_rows, fitting_rows
from rl_vlm.data.frames import frames_as_images
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import DataError, Finding
from rl_vlm.model.policy import Policy
from rl_vlm.tools.checks.diagnosis import Note, collect
from rl_vlm.tools.checks.pixels import check_pixels
from rl_vlm.tools.checks.videos import video_notes
from rl_vlm.types import Sample, VideoFormat
from tests.helpers.builders import make_policy, processor_of, sharp_checkpoint

ROWS = f"{__name__}:rows"


def rows() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    clips = [generator.integers(256, size=(8, 24, 32, 3), dtype=np.uint8) for _ in range(2)]
    return [{"prompt": "What moves?", "video": clip, "solution": "a car"} for clip in clips]


def usable(builder: PromptBuilder) -> UsableRows:
    loaded = load_rows(builder.data, "train")
    return fitting_rows(check_rows(loaded, set(), Ranks()), builder, None)


def builder_of(checkpoint: Path, video_format: VideoFormat) -> PromptBuilder:
    data = DataConfig(dataset_name=ROWS, num_frames=4)
    return PromptBuilder(processor_of(checkpoint), data, video_format=video_format)


def diagnosed(policy: Policy, builder: PromptBuilder) -> tuple[list[Finding], list[str]]:
    found = collect(check_pixels(policy, builder, usable(builder)))
    assert found.not_checked == []
    return found.findings, found.checked


@pytest.fixture(scope="module", params=["native", "frames"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, PromptBuilder]:
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model") / request.param)
    return make_policy(checkpoint), builder_of(checkpoint, request.param)


def test_videos_reach_a_sound_model(made: tuple[Policy, PromptBuilder]):
    findings, notes = diagnosed(*made)
    assert findings == []
    assert [note.partition(" change a log-prob")[0] for note in notes] == [
        "pixels of 2 rows: other videos", "pixels of 2 rows: frames in reverse order",
    ]  # fmt: skip


def test_a_model_without_features_of_videos_is_found(
    made: tuple[Policy, PromptBuilder], monkeypatch: pytest.MonkeyPatch
):
    policy, builder = made
    model: Any = policy.transformer.base_model
    projection = model.visual.merger.mlp[2]
    monkeypatch.setattr(projection, "weight", torch.nn.Parameter(torch.zeros_like(projection.weight)))
    monkeypatch.setattr(projection, "bias", torch.nn.Parameter(torch.zeros_like(projection.bias)))
    findings, _ = diagnosed(policy, builder)
    blind = ("error", "pixels that do not reach the model")
    unordered = ("warning", "order of frames that does not reach the model")
    assert [(each.severity, each.kind) for each in findings] == [blind, unordered] * 2
    assert "with other videos the log-probs of a completion change by" in findings[0].what


def by_brightness(sample: Sample) -> Sample:
    """Frames as images in order of their brightness."""
    for video in sample.videos:
        video.frames[:] = video.frames[np.argsort(video.frames.mean((1, 2, 3)))]
    return frames_as_images(sample)


def test_a_model_without_the_order_of_frames_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path / "model")
    monkeypatch.setattr(prompts, "frames_as_images", by_brightness)
    findings, _ = diagnosed(make_policy(checkpoint), builder_of(checkpoint, "frames"))
    assert [(each.severity, each.kind) for each in findings] == [
        ("warning", "order of frames that does not reach the model")
    ] * 2


def test_a_template_that_leaves_videos_out_is_found(tmp_path: Path):
    builder = builder_of(sharp_checkpoint("qwen2_5_vl", tmp_path / "model"), "native")
    builder.processor.chat_template = (
        "{% for m in messages %}{% for b in m.content %}{{ b.text }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"1 videos became 0 tokens .* trained blind"):
        list(video_notes(usable(builder), builder))


def test_frames_and_tokens_of_a_video(made: tuple[Policy, PromptBuilder]):
    _, builder = made
    (note,) = list(video_notes(usable(builder), builder))
    assert isinstance(note, Note)
    expected = {
        # Qwen's rule takes every second of the eight frames, at 2 a second. A joined pair of frames has 8 x 6 patches,
        # of which four are a token, and there are two tokens around all.
        "native": ("0.0, 1.0, 2.0, 3.0 s of 4.0 s, in the model's own input", "26 tokens, 6.5 per frame"),
        # Frames 0, 2, 5, 7. Each has 12 tokens of pixels, two around them, and seven of the time.
        "frames": ("0.0, 1.0, 2.5, 3.5 s of 4.0 s, as images", "84 tokens, 21.0 per frame"),
    }
    times, tokens = expected[builder.video_format]
    assert note.text.startswith(f"{ROWS}, row 0: 4 frames of 32x24 pixels at {times}")
    assert note.text.endswith(f": {tokens}")
