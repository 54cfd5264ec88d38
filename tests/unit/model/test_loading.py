import json
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config.schema import ModelConfig, RunConfig
from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.model.loading import load_model, longest_prompt, native_or_frames


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "fp8"},
        {"quant_method": "gptq", "bits": 4},
    ],
    ids=["bitsandbytes", "fp8", "gptq"],
)
@pytest.mark.parametrize("as_adapter", [False, True], ids=["model", "QLoRA adapter"])
@pytest.mark.parametrize("empty", [False, True], ids=["whole", "empty"])
def test_quantized_checkpoints_are_refused(
    tmp_path: Path, quantization: dict[str, Any], as_adapter: bool, empty: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "quantization_config": quantization}))
    named = tmp_path
    if as_adapter:
        named = tmp_path / "adapter"
        named.mkdir()
        (named / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    with pytest.raises(ModelError, match=rf"{tmp_path} is quantized \({quantization['quant_method']}, .*made from"):
        load_model(str(named), None, ModelConfig(model_name_or_path=str(named)), empty=empty)


def test_completions_leave_room_for_a_prompt(tmp_path: Path) -> None:
    text = {"model_type": "qwen2_5_vl_text", "max_position_embeddings": 50}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "text_config": text}))
    sections = {"model": {"model_name_or_path": str(tmp_path)}, "rollout": {"max_completion_length": 49}}
    config = RunConfig.model_validate(sections)
    assert longest_prompt(config, str(tmp_path)) == 1
    config.rollout.max_completion_length = 50
    with pytest.raises(ConfigError, match="max_completion_length 50 leaves no room for a prompt: the model takes 50"):
        longest_prompt(config, str(tmp_path))


FORMS = {
    "qwen2_5_vl": ["native", "native", "native", "frames"],
    "glm4v": ["native", "native", "native", "frames"],
    "gemma4": ["native", "frames", "frames", "frames"],
    "kimi_k25": ["native", "frames", "frames", "frames"],
    "llava": ["frames", "frames", "frames", "frames"],
}
"""The form of videos with hf, vllm, vllm_server, and vllm with transformers' models."""


def run_with(checkpoint: Path, engine: str, video_format: str = "auto", **vllm: Any) -> RunConfig:
    (checkpoint / "config.json").write_text(json.dumps({"model_type": checkpoint.name}))
    return RunConfig.model_validate({
        "model": {"model_name_or_path": str(checkpoint)},
        "data": {"dataset_name": "org/data", "video_format": video_format},
        "rollout": {"engine": engine},
        "vllm": vllm,
    })  # fmt: skip


@pytest.fixture
def named(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory for a checkpoint of the model type that the test names."""
    folder = tmp_path / request.param
    folder.mkdir()
    return folder


@pytest.mark.parametrize("named", FORMS, indirect=True)
def test_a_model_and_an_engine_decide_the_form_of_videos(named: Path) -> None:
    runs = [run_with(named, engine) for engine in ("hf", "vllm", "vllm_server")]
    runs.append(run_with(named, "vllm", vllm_model_impl="transformers"))
    assert [native_or_frames(run, str(named)) for run in runs] == FORMS[named.name]
    frames = [run_with(named, engine, "frames") for engine in ("hf", "vllm", "vllm_server")]
    assert [native_or_frames(run, str(named)) for run in frames] == ["frames"] * 3


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("gemma4", "rollout.engine vllm and this gemma4: vLLM's model has not been shown to read videos"),
        ("kimi_k25", "rollout.engine vllm and this kimi_k25: vLLM's model has not been shown to read videos"),
        ("llava", "data.video_format: native needs a model with an input for videos, and llava is used without one"),
    ],
    indirect=["named"],
)
def test_a_native_form_that_vllm_or_the_model_lacks_is_refused(named: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        native_or_frames(run_with(named, "vllm", "native"), str(named))


@pytest.mark.parametrize("named", ["glm4v"], indirect=True)
def test_vllm_takes_one_video_in_a_prompt_of_glm(named: Path) -> None:
    assert native_or_frames(run_with(named, "vllm"), str(named), most_videos=1) == "native"
    assert native_or_frames(run_with(named, "hf"), str(named), most_videos=2) == "native"
    assert native_or_frames(run_with(named, "vllm", "frames"), str(named), most_videos=2) == "frames"
    with pytest.raises(ConfigError, match=r"rollout.engine: vllm takes 1 video in a prompt of glm4v, and the data has"):
        native_or_frames(run_with(named, "vllm"), str(named), most_videos=2)
