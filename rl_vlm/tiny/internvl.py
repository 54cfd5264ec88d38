"""InternVL, which cuts an image into square tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import Resolution, TinyFamily, chat_template, hf_class, text_sizes, vision_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

INTERNVL_TOKENS = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
ONE_TILE = Resolution(16, 2)
"""A tile has patches of 4 x 4 pixels, of which each 2 x 2 become one token."""


def _config(tokenizer: Any, hidden_size: int, resolution: Resolution = ONE_TILE) -> PreTrainedConfig:
    return hf_class("InternVLConfig")(
        text_config=text_sizes(tokenizer, hidden_size, "qwen2"),
        vision_config=vision_sizes(resolution.patch_size(merged=2), resolution.side, num_layers=1),
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=resolution.num_tokens,
    )


def _processor(tokenizer: Any, resolution: Resolution | None = None) -> ProcessorMixin:
    """Build a processor that cuts images into up to four tiles, or into one of a given resolution."""
    tile = resolution or ONE_TILE
    cropping: dict[str, Any] = {"crop_to_patches": resolution is None, "max_patches": 1 if resolution else 4}
    return hf_class("InternVLProcessor")(
        image_processor=hf_class("GotOcr2ImageProcessor")(size=tile.size, **cropping),
        tokenizer=tokenizer,
        video_processor=hf_class("InternVLVideoProcessor")(size=tile.size),
        image_seq_length=tile.num_tokens,
        chat_template=chat_template("<IMG_CONTEXT>", "<video>"),
    )


INTERNVL: dict[str, TinyFamily] = {
    "internvl": TinyFamily(
        INTERNVL_TOKENS,
        _config,
        _processor,
        {
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        is_resizable=True,
    ),
}
