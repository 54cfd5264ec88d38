"""Families with the patches of all images in one row: EXAONE 4.5, VideoLLaMA 3, PaddleOCR, Hunyuan, ERNIE 4.5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, mrope, text_sizes
from rl_vlm.tiny.gemma import sliding_sizes
from rl_vlm.tiny.qwen import SPECIAL_TOKENS, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

PIXELS = {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
_PATCHES: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": PIXELS}
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_PADDLE_TOKENS = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
_ERNIE_TOKENS = {
    "image_token": "<|IMAGE_PLACEHOLDER|>", "image_start_token": "<|IMAGE_START|>", "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>", "video_start_token": "<|VIDEO_START|>", "video_end_token": "<|VIDEO_END|>",
}  # fmt: skip
_HUNYUAN_TOKENS = {
    "image_token": "<|hy_place|>", "image_start_token": "<|hy_image|>", "image_end_token": "<|hy_image_end|>",
}  # fmt: skip


def _exaone4_5_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_key_value_heads": 2,
        "patch_size": 4, "window_size": 32, "out_hidden_size": hidden_size, "fullatt_block_indexes": [1],
    }  # fmt: skip
    ids = {name: token_ids(tokenizer)[name] for name in ("image_token_id", "video_token_id")}
    text = sliding_sizes(tokenizer, hidden_size, "exaone4") | {"sliding_window_pattern": 2}
    return hf_class("Exaone4_5_Config")(text_config=text, vision_config=vision, **ids)


def _exaone4_5_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("Exaone4_5_Processor")(
        image_processor=hf_class("Qwen2VLImageProcessor")(**_PATCHES),
        tokenizer=tokenizer,
        video_processor=hf_class("Qwen2VLVideoProcessor")(**_PATCHES),
        chat_template=chat_template(_IMAGE, _VIDEO),
    )


def _video_llama_3_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    ids = {name: token_ids(tokenizer)[name] for name in ("image_token_id", "video_token_id")}
    return hf_class("VideoLlama3Config")(
        text_config=text_sizes(tokenizer, hidden_size, "qwen2"), vision_config=_VISION, **ids
    )


def _video_llama_3_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("VideoLlama3Processor")(
        image_processor=hf_class("VideoLlama3ImageProcessor")(**_PATCHES),
        tokenizer=tokenizer,
        video_processor=hf_class("VideoLlama3VideoProcessor")(patch_size=4),
        chat_template=chat_template(_IMAGE),
    )


def _paddleocr_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    text = text_sizes(tokenizer, hidden_size, "paddleocr_vl_text") | {
        "rope_parameters": mrope(hidden_size // 8), "tie_word_embeddings": False,
    }  # fmt: skip
    del text["model_type"]
    return hf_class("PaddleOCRVLConfig")(
        text_config=text,
        vision_config=_VISION | {"image_size": 32},
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        tie_word_embeddings=False,
    )


def _paddleocr_vl_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("PaddleOCRVLProcessor")(
        image_processor=hf_class("PaddleOCRVLImageProcessor")(**_PATCHES),
        tokenizer=tokenizer,
        chat_template=chat_template("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
    )


def _ernie4_5_vl_moe_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use one layer without experts, and one with experts for text and others for images."""
    experts = {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_intermediate_size": [64, 32]}
    text = text_sizes(tokenizer, hidden_size, "") | experts | {
        "intermediate_size": 2 * hidden_size, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
    }  # fmt: skip
    del text["model_type"]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    ids = {name: getattr(tokenizer, name) for kind in ("image", "video") for name in _ernie_ids(kind)}
    return hf_class("Ernie4_5_VLMoeConfig")(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def _ernie_ids(kind: str) -> list[str]:
    return [f"{kind}{part}_token_id" for part in ("", "_start", "_end")]


def _ernie4_5_vl_moe_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("Ernie4_5_VLMoeProcessor")(
        image_processor=hf_class("Ernie4_5_VLMoeImageProcessor")(**_PATCHES),
        tokenizer=tokenizer,
        video_processor=hf_class("Ernie4_5_VLMoeVideoProcessor")(patch_size=4, merge_size=2, draw_on_frames=False),
        chat_template=chat_template("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
    )


def _hunyuan_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use four kinds of positions: in the text, along width and height, and the number of the image."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [hidden_size // 32] * 4}
    text = text_sizes(tokenizer, hidden_size, "hunyuan_vl_text") | {"rope_parameters": rope}
    del text["model_type"]
    return hf_class("HunYuanVLConfig")(
        text_config=text | {"bos_token_id": None},
        vision_config=_VISION | {"max_image_size": 32, "min_image_size": 8, "text_hidden_size": hidden_size},
        image_token_id=tokenizer.image_token_id,
        im_start_id=tokenizer.image_start_token_id,
        im_end_id=tokenizer.image_end_token_id,
        tie_word_embeddings=False,
    )


def _hunyuan_vl_processor(tokenizer: Any) -> ProcessorMixin:
    patches: dict[str, Any] = _PATCHES | {"size": PIXELS | {"shortest_edge": 16 * 16}}
    return hf_class("HunYuanVLProcessor")(
        image_processor=hf_class("HunYuanVLImageProcessor")(**patches),
        tokenizer=tokenizer,
        chat_template=chat_template("".join(_HUNYUAN_TOKENS[f"image_{part}token"] for part in ("start_", "", "end_"))),
    )


GRIDS: dict[str, TinyFamily] = {
    "exaone4_5": TinyFamily(SPECIAL_TOKENS, _exaone4_5_config, _exaone4_5_processor),
    "video_llama_3": TinyFamily(SPECIAL_TOKENS, _video_llama_3_config, _video_llama_3_processor),
    "paddleocr_vl": TinyFamily(
        (*_PADDLE_TOKENS.values(), "<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>"),
        _paddleocr_vl_config,
        _paddleocr_vl_processor,
        _PADDLE_TOKENS,
    ),
    "ernie4_5_vl_moe": TinyFamily(
        tuple(_ERNIE_TOKENS.values()), _ernie4_5_vl_moe_config, _ernie4_5_vl_moe_processor, _ERNIE_TOKENS
    ),
    "hunyuan_vl": TinyFamily(
        tuple(_HUNYUAN_TOKENS.values()), _hunyuan_vl_config, _hunyuan_vl_processor, _HUNYUAN_TOKENS
    ),
}
