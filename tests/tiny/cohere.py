"""Aya Vision and Cohere2 Vision, on Cohere2's language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class
from rl_vlm.tiny.gemma import SIGLIP, sliding_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

_AYA_TOKENS = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>")
_COHERE_TOKENS = {
    "image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}  # fmt: skip


def _aya_vision_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    return hf_class("AyaVisionConfig")(
        text_config=sliding_sizes(tokenizer, hidden_size, "cohere2"),
        vision_config=SIGLIP,
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
    )


def _aya_vision_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("AyaVisionProcessor")(
        image_processor=hf_class("GotOcr2ImageProcessor")(size={"height": 16, "width": 16}, max_patches=4),
        tokenizer=tokenizer,
        patch_size=4,
        img_size=16,
        downsample_factor=2,
        chat_template=chat_template("<image>"),
    )


def _cohere2_vision_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    return hf_class("Cohere2VisionConfig")(
        text_config=sliding_sizes(tokenizer, hidden_size, "cohere2"),
        vision_config=SIGLIP | {"image_size": 32},
        alignment_intermediate_size=2 * hidden_size,
        image_token_id=tokenizer.image_token_id,
    )


def _cohere2_vision_processor(tokenizer: Any) -> ProcessorMixin:
    """Use tiles of twice `patch_size`: they have `patch_size` squared tokens, as the processor counts them."""
    sizes: dict[str, Any] = {"size": {"height": 32, "width": 32}, "patch_size": 4, "max_patches": 3}
    return hf_class("Cohere2VisionProcessor")(
        image_processor=hf_class("Cohere2VisionImageProcessor")(**sizes),
        tokenizer=tokenizer,
        chat_template=chat_template("<|IMG_PATCH|>"),
    )


COHERE: dict[str, TinyFamily] = {
    "aya_vision": TinyFamily(_AYA_TOKENS, _aya_vision_config, _aya_vision_processor),
    "cohere2_vision": TinyFamily(
        tuple(_COHERE_TOKENS.values()), _cohere2_vision_config, _cohere2_vision_processor, _COHERE_TOKENS
    ),
}
