import json
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config.schema import ModelConfig, RunConfig
from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.model.loading import load_model, longest_prompt


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
