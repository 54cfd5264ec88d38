"""Checkpoints whose model and processor come as Python files in their directory (`auto_map`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

CONFIGURATION = """
from transformers import Qwen2_5_VLConfig


class OwnConfig(Qwen2_5_VLConfig):
    model_type = "own_vl"
"""
MODELING = """
import torch
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLModel

from .configuration_own import OwnConfig
from .scale_own import scaled


class OwnModel(Qwen2_5_VLModel):
    def __init__(self, config):
        super().__init__(config)
        self.image_scale = nn.Parameter(torch.ones(config.text_config.hidden_size))

    def get_image_features(self, *args, **kwargs):
        output = super().get_image_features(*args, **kwargs)
        output.pooler_output = tuple(scaled(part, self.image_scale) for part in output.pooler_output)
        return output


class OwnForConditionalGeneration(Qwen2_5_VLForConditionalGeneration):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""
SCALE = """
def scaled(features, scale):
    return features * scale
"""
PROCESSING = """
from transformers import Qwen2_5_VLProcessor


class OwnProcessor(Qwen2_5_VLProcessor):
    def apply_chat_template(self, conversation, *args, **kwargs):
        kind = type(conversation)
        return super().apply_chat_template(kind([*conversation]), *args, **kwargs)
"""
FILES = {
    "configuration_own.py": CONFIGURATION, "modeling_own.py": MODELING, "scale_own.py": SCALE,
    "processing_own.py": PROCESSING,
}  # fmt: skip
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForImageTextToText": "modeling_own.OwnForConditionalGeneration",
}


def with_own_code(checkpoint: Path, scale: float = 1.0) -> Path:
    """Turn a tiny Qwen2.5-VL into a model of an unknown type, which scales image features by a vector of weights."""
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights["model.image_scale"] = torch.full((model.config.text_config.hidden_size,), scale)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    for name, source in FILES.items():
        (checkpoint / name).write_text(source)
    change(checkpoint / "config.json", model_type="own_vl", auto_map=AUTO_MAP, architectures=[*AUTO_MAP.values()][1:])
    change(
        checkpoint / "processor_config.json",
        processor_class="OwnProcessor", auto_map={"AutoProcessor": "processing_own.OwnProcessor"},
    )  # fmt: skip
    return checkpoint


def change(path: Path, **values: Any) -> None:
    """Change top-level values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2))
