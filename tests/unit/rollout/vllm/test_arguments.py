"""Arguments of vLLM's engine that depend on the model."""

from pathlib import Path

import pytest
import torch
from transformers import Llama4Config, PreTrainedConfig, Qwen2_5_VLConfig, Qwen3_5Config

from rl_vlm.config.schema import DataConfig, ModelConfig, RunConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.errors import ConfigError
from rl_vlm.rollout.vllm.arguments import engine_arguments, model_runner
from rl_vlm.types import VideoFormat
from tests.tiny.build import build_tiny


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize(("config", "is_cached"), [(Qwen2_5_VLConfig, True), (Qwen3_5Config, False)])
def test_prefixes_of_models_with_states_are_not_cached_on_cpus(
    config: type[PreTrainedConfig], is_cached: bool, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config().save_pretrained(tmp_path)
    run = RunConfig(model=ModelConfig(model_name_or_path=str(tmp_path)), data=DataConfig(dataset_name="rows.jsonl"))
    arguments = engine_arguments(run, str(tmp_path), lora_rank=None)
    assert arguments.get("enable_prefix_caching", True) is (is_cached or has_gpu)


def test_a_request_may_have_any_number_of_images_and_the_tokens_of_a_whole_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image has no limit of its own here: vLLM's is then 999 (`MultiModalConfig.get_limit_per_prompt`)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    run = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": str(tmp_path)},
            "data": {"dataset_name": "rows.jsonl", "max_prompt_length": 300},
            "rollout": {"engine": "vllm", "tools": ["tools.py:crop"], "max_completion_length": 700, "max_turns": 8},
        }
    )
    arguments = engine_arguments(run, str(tmp_path), lora_rank=None)
    assert arguments["limit_mm_per_prompt"] == {"video": 0}
    assert arguments["max_model_len"] == 1000
    assert arguments["mm_device_do_normalize"] is False  # processors normalize pixels, as for the trainer


@pytest.mark.parametrize("tuned", [True, False])
def test_the_attention_of_llama_4_is_as_sharp_as_its_config_says(tuned: bool, tmp_path: Path) -> None:
    """`Llama4ForCausalLM` of vLLM 0.32 reads this of a generation config alone."""
    Llama4Config(text_config={"attn_temperature_tuning": tuned}).save_pretrained(tmp_path)
    run = RunConfig(model=ModelConfig(model_name_or_path=str(tmp_path)), data=DataConfig(dataset_name="rows.jsonl"))
    arguments = engine_arguments(run, str(tmp_path), lora_rank=None)
    assert arguments["override_generation_config"] == {"attn_temperature_tuning": tuned}


@pytest.mark.ci
def test_vllm_itself_limits_no_images() -> None:
    multimodal = pytest.importorskip("vllm.config.multimodal")
    config = multimodal.MultiModalConfig(limit_per_prompt={"video": 0})
    assert (config.get_limit_per_prompt("image"), config.get_limit_per_prompt("video")) == (999, 0)


def test_the_model_runner_is_vllms_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert [model_runner(choice) for choice in ("auto", "v1", "v2")] == [
        {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    ]  # fmt: skip
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert (model_runner("auto"), model_runner("v2")) == ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    with pytest.raises(ConfigError, match="v1 needs VLLM_USE_V2_MODEL_RUNNER=0, and the environment has 1; unset it"):
        model_runner("v1")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, None), (256, {"images_kwargs": {"max_pixels": 256}})],
)
def test_limits_of_pixels_are_of_images(
    limit: int | None, expected: dict[str, dict[str, int]] | None, tmp_path: Path
) -> None:
    """VLLM halves a limit that is of videos too, and an image of one token is then less than a token."""
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    data = DataConfig(dataset_name="rows.jsonl", max_pixels=limit)
    run = RunConfig(model=ModelConfig(model_name_or_path=str(tmp_path)), data=data)
    assert engine_arguments(run, str(tmp_path), lora_rank=None).get("mm_processor_kwargs") == expected


@pytest.mark.parametrize(
    ("video_format", "most_videos", "limit", "batch"),
    [("native", 2, 2, 9000), ("native", None, 999, 9000), ("native", 0, 0, None), ("frames", 2, 0, None)],
)
def test_a_prompt_may_have_as_many_videos_as_the_data_and_none_is_larger_than_a_batch(
    video_format: VideoFormat, most_videos: int | None, limit: int, batch: int | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Frames are resized once, before: here the processor's smallest frame is larger than those of the data."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checkpoint = str(build_tiny("qwen2_5_vl", tmp_path))
    data = DataConfig(dataset_name="rows.jsonl", max_prompt_length=8000, max_pixels=256)
    run = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": checkpoint},
            "data": data,
            "rollout": {"engine": "vllm", "max_completion_length": 1000},
        }
    )
    processor = load_processor(checkpoint, run.model, data)
    builder = PromptBuilder(processor, data, video_format=video_format, most_videos=most_videos)
    arguments = engine_arguments(run, checkpoint, None, builder)
    assert arguments["limit_mm_per_prompt"] == {"video": limit}
    assert arguments.get("max_num_batched_tokens") == batch
    videos = {"videos_kwargs": {"do_resize": False}} if video_format == "native" else {}
    assert arguments["mm_processor_kwargs"] == {"images_kwargs": {"max_pixels": 256}} | videos
    own_loader = {"video": {"video_backend": "rl_vlm"}} if video_format == "native" else None
    assert arguments.get("media_io_kwargs") == own_loader


def test_a_processor_with_one_size_of_frames_resizes_them(tmp_path: Path) -> None:
    checkpoint = str(build_tiny("internvl", tmp_path))
    run = RunConfig(model=ModelConfig(model_name_or_path=checkpoint), data=DataConfig(dataset_name="rows.jsonl"))
    builder = PromptBuilder(load_processor(checkpoint, run.model, run.data), run.data, most_videos=1)
    assert "mm_processor_kwargs" not in engine_arguments(run, checkpoint, None, builder)
