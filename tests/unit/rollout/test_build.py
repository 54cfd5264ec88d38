"""The builder of a run's prompts gives videos to a model in the form that the settings ask for."""

from pathlib import Path

import pytest

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import ConfigError
from rl_vlm.rollout.build import prompt_builder
from tests.tiny.build import build_tiny


def format_of(checkpoint: Path, wanted: str, engine: str = "hf", most_videos: int | None = None, **vllm: str) -> str:
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": str(checkpoint)},
            "data": {"video_format": wanted},
            "rollout": {"engine": engine},
            "vllm": vllm,
        }
    )
    builder = prompt_builder(config, str(checkpoint), most_videos)
    assert isinstance(builder, PromptBuilder)
    return builder.video_format


def test_a_model_with_an_input_for_videos_can_get_frames_as_images(tmp_path: Path) -> None:
    checkpoint = build_tiny("qwen2_5_vl", tmp_path)
    found = [format_of(checkpoint, wanted) for wanted in ("auto", "native", "frames")]
    assert found == ["native", "native", "frames"]


def test_vllm_gets_videos_in_the_models_input_for_them(tmp_path: Path) -> None:
    checkpoint = build_tiny("qwen2_5_vl", tmp_path)
    for engine in ("vllm", "vllm_server"):
        found = [format_of(checkpoint, wanted, engine, 3) for wanted in ("auto", "native", "frames")]
        assert found == ["native", "native", "frames"]


def test_vllm_gets_frames_as_images_if_its_model_is_not_shown_to_read_videos(tmp_path: Path) -> None:
    gemma = build_tiny("gemma4", tmp_path / "gemma")
    assert [format_of(gemma, wanted, "vllm") for wanted in ("auto", "frames")] == ["frames", "frames"]
    with pytest.raises(ConfigError, match=r"video_format: native cannot be used with rollout\.engine vllm and this g"):
        format_of(gemma, "native", "vllm")
    qwen = build_tiny("qwen2_5_vl", tmp_path / "qwen")
    assert format_of(qwen, "auto", "vllm", vllm_model_impl="transformers") == "frames"


def test_vllm_takes_one_video_of_glm(tmp_path: Path) -> None:
    checkpoint = build_tiny("glm4v", tmp_path)
    assert [format_of(checkpoint, "auto", "vllm", most) for most in (None, 0, 1)] == ["native"] * 3
    assert (format_of(checkpoint, "frames", "vllm", 2), format_of(checkpoint, "auto", "hf", 2)) == ("frames", "native")
    with pytest.raises(ConfigError, match=r"^rollout\.engine: vllm takes 1 video in a prompt of glm4v, .* with 2\."):
        format_of(checkpoint, "auto", "vllm", 2)


def test_a_model_without_an_input_for_videos_gets_frames_as_images(tmp_path: Path) -> None:
    checkpoint = build_tiny("llava", tmp_path)
    assert [format_of(checkpoint, wanted) for wanted in ("auto", "frames")] == ["frames", "frames"]
    with pytest.raises(ConfigError, match=r"video_format: native .* llava is"):
        format_of(checkpoint, "native")
