"""Arguments of vLLM's engine that depend on the model."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, Qwen2_5_VLConfig, Qwen3_5Config

from rl_vlm.config.schema import DataConfig, ModelConfig, RunConfig
from rl_vlm.errors import ConfigError
from rl_vlm.rollout.vllm.arguments import engine_arguments, model_runner


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
