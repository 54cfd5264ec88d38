"""Processors of checkpoints whose code comes with them and builds prompts in its own way, such as a method `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.config.adapters import base_of
from rl_vlm.config.own_code import class_name, has_own_code
from rl_vlm.config.schema import ModelConfig
from rl_vlm.data.remote.cogvlm import CogVLMProcessor
from rl_vlm.data.remote.internvl import InternVLProcessor
from rl_vlm.data.remote.minicpmv import MiniCPMVProcessor

if TYPE_CHECKING:
    from transformers import ProcessorMixin

PROCESSORS = {
    "InternVLChatModel": InternVLProcessor, "MiniCPMV": MiniCPMVProcessor, "CogVLMForCausalLM": CogVLMProcessor,
}  # fmt: skip
"""By the model's published class, written from published signatures. None has run on a real checkpoint."""


def own_processor(path: str, model: ModelConfig) -> ProcessorMixin | None:
    """Load the processor of a checkpoint in `PROCESSORS`. Return None for any other, or if its code is not trusted."""
    from transformers import AutoConfig

    if not model.trust_remote_code:
        return None
    source: dict[str, Any] = {"revision": model.model_revision, "trust_remote_code": True}
    config = AutoConfig.from_pretrained(base_of(path), **source)
    found: Any = PROCESSORS.get(class_name(config)) if has_own_code(config) else None
    return found.load(path, config, source) if found else None
