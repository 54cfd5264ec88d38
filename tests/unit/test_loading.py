import json
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ModelError
from rl_vlm.model.loading import load_model


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
