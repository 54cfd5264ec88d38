"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import Resolution, TinyFamily, chat_template, hf_class, layer_sizes, mrope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

NUM_FRAMES = 64
"""Frames of which a video's pixels are counted together, for processors that bound those of all frames (Qwen3-VL)."""
KINDS = ("image", "video")
SPECIAL_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def token_ids(tokenizer: Any) -> dict[str, Any]:
    ids = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }


def _text_sizes(tokenizer: Any, hidden_size: int) -> dict[str, Any]:
    """Return sizes with heads of 32, the smallest that vLLM runs on CPUs."""
    num_heads = max(1, hidden_size // 32)
    return layer_sizes(tokenizer, hidden_size) | {
        "num_attention_heads": num_heads, "num_key_value_heads": 1, "bos_token_id": None,
        "rope_parameters": mrope(hidden_size // num_heads // 2),
    }  # fmt: skip


def patch_size(resolution: Resolution | None) -> int:
    """Return the side of a patch. 2 x 2 patches become one token."""
    return resolution.patch_size(merged=2) if resolution else 4


def _qwen2_vl_config(tokenizer: Any, hidden_size: int, resolution: Resolution | None = None) -> PreTrainedConfig:
    vision = {
        "depth": 2, "embed_dim": 64, "num_heads": 4, "patch_size": patch_size(resolution), "mlp_ratio": 2,
        "hidden_size": hidden_size,
    }  # fmt: skip
    return hf_class("Qwen2VLConfig")(
        text_config=_text_sizes(tokenizer, hidden_size), vision_config=vision, **token_ids(tokenizer)
    )


def _qwen2_5_vl_config(tokenizer: Any, hidden_size: int, resolution: Resolution | None = None) -> PreTrainedConfig:
    patch = patch_size(resolution)
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": patch,
        "window_size": 8 * patch, "out_hidden_size": hidden_size, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return hf_class("Qwen2_5_VLConfig")(
        text_config=_text_sizes(tokenizer, hidden_size), vision_config=vision, **token_ids(tokenizer)
    )


def _qwen3_text_sizes(tokenizer: Any, hidden_size: int, num_deepstack: int) -> dict[str, Any]:
    """Return sizes with a language layer for each of the tower's deepstack layers, and at least two."""
    return _text_sizes(tokenizer, hidden_size) | {
        "head_dim": 32, "num_hidden_layers": max(2, num_deepstack),
        "rope_parameters": mrope(16, mrope_interleaved=True),
    }  # fmt: skip


def _qwen3_vision(hidden_size: int, num_deepstack: int, resolution: Resolution | None) -> dict[str, Any]:
    return {
        "depth": num_deepstack + 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
        "patch_size": patch_size(resolution), "out_hidden_size": hidden_size, "num_position_embeddings": 64,
        "deepstack_visual_indexes": list(range(num_deepstack)),
    }  # fmt: skip


def _qwen3_vl_config(
    tokenizer: Any, hidden_size: int, num_deepstack: int, resolution: Resolution | None = None
) -> PreTrainedConfig:
    text = _qwen3_text_sizes(tokenizer, hidden_size, num_deepstack)
    vision = _qwen3_vision(hidden_size, num_deepstack, resolution)
    return hf_class("Qwen3VLConfig")(text_config=text, vision_config=vision, **token_ids(tokenizer))


def _qwen3_vl_moe_config(
    tokenizer: Any, hidden_size: int, num_deepstack: int, resolution: Resolution | None = None
) -> PreTrainedConfig:
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size, "norm_topk_prob": True,
    }  # fmt: skip
    text = _qwen3_text_sizes(tokenizer, hidden_size, num_deepstack) | experts
    vision = _qwen3_vision(hidden_size, num_deepstack, resolution)
    return hf_class("Qwen3VLMoeConfig")(text_config=text, vision_config=vision, **token_ids(tokenizer))


def qwen_processor(processor_class: str, video_class: str) -> Callable[..., ProcessorMixin]:
    def build(tokenizer: Any, resolution: Resolution | None = None) -> ProcessorMixin:
        smallest, largest = (resolution.side, resolution.side) if resolution else (8, 64)
        sizes: dict[str, Any] = {"patch_size": patch_size(resolution), "merge_size": 2}
        num_counted = 1 if "Qwen2" in video_class else NUM_FRAMES
        pixels = {"shortest_edge": smallest**2, "longest_edge": largest**2 * num_counted}
        return hf_class(processor_class)(
            image_processor=hf_class("Qwen2VLImageProcessor")(**sizes, min_pixels=smallest**2, max_pixels=largest**2),
            tokenizer=tokenizer,
            video_processor=hf_class(video_class)(**sizes, size=pixels),
            chat_template=chat_template(*(f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in KINDS)),
        )

    return build


def qwen3_vl(num_deepstack: int) -> dict[str, TinyFamily]:
    """Return Qwen3-VL and Qwen3-VL-MoE, whose towers add features to the first `num_deepstack` language layers."""
    processor = qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor")
    configs = {"qwen3_vl": _qwen3_vl_config, "qwen3_vl_moe": _qwen3_vl_moe_config}
    return {
        name: TinyFamily(SPECIAL_TOKENS, partial(config, num_deepstack=num_deepstack), processor, is_resizable=True)
        for name, config in configs.items()
    }


def _qwen2(config: Callable[..., PreTrainedConfig], processor_class: str) -> TinyFamily:
    processor = qwen_processor(processor_class, "Qwen2VLVideoProcessor")
    return TinyFamily(SPECIAL_TOKENS, config, processor, is_resizable=True)


QWEN: dict[str, TinyFamily] = {
    "qwen2_vl": _qwen2(_qwen2_vl_config, "Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen2(_qwen2_5_vl_config, "Qwen2_5_VLProcessor"),
    **qwen3_vl(num_deepstack=1),
}
