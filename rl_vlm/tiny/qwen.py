"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, layer_sizes, mrope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

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


def _qwen2_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import Qwen2VLConfig

    vision = {"depth": 2, "embed_dim": 64, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2, "hidden_size": hidden_size}
    return Qwen2VLConfig(text_config=_text_sizes(tokenizer, hidden_size), vision_config=vision, **token_ids(tokenizer))


def _qwen2_5_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import Qwen2_5_VLConfig

    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "window_size": 32,
        "out_hidden_size": hidden_size, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=_text_sizes(tokenizer, hidden_size), vision_config=vision, **token_ids(tokenizer)
    )


def _qwen3_text_sizes(tokenizer: Any, hidden_size: int, num_deepstack: int) -> dict[str, Any]:
    """Return sizes with a language layer for each of the tower's deepstack layers, and at least two."""
    return _text_sizes(tokenizer, hidden_size) | {"head_dim": 32, "num_hidden_layers": max(2, num_deepstack)}


def _qwen3_vision(hidden_size: int, num_deepstack: int) -> dict[str, Any]:
    return {
        "depth": num_deepstack + 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4,
        "out_hidden_size": hidden_size, "num_position_embeddings": 64,
        "deepstack_visual_indexes": list(range(num_deepstack)),
    }  # fmt: skip


def _qwen3_vl_config(tokenizer: Any, hidden_size: int, num_deepstack: int) -> PreTrainedConfig:
    from transformers import Qwen3VLConfig

    text = _qwen3_text_sizes(tokenizer, hidden_size, num_deepstack)
    vision = _qwen3_vision(hidden_size, num_deepstack)
    return Qwen3VLConfig(text_config=text, vision_config=vision, **token_ids(tokenizer))


def _qwen3_vl_moe_config(tokenizer: Any, hidden_size: int, num_deepstack: int) -> PreTrainedConfig:
    from transformers import Qwen3VLMoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    text = _qwen3_text_sizes(tokenizer, hidden_size, num_deepstack) | experts
    vision = _qwen3_vision(hidden_size, num_deepstack)
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, **token_ids(tokenizer))


def qwen_processor(processor_class: str, video_class: str) -> Callable[[Any], ProcessorMixin]:
    def build(tokenizer: Any) -> ProcessorMixin:
        import transformers

        sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "min_pixels": 8 * 8, "max_pixels": 64 * 64}
        return getattr(transformers, processor_class)(
            image_processor=transformers.Qwen2VLImageProcessor(**sizes),
            tokenizer=tokenizer,
            video_processor=getattr(transformers, video_class)(patch_size=4, merge_size=2),
            chat_template=chat_template("<|vision_start|><|image_pad|><|vision_end|>"),
        )

    return build


def qwen3_vl(num_deepstack: int) -> dict[str, TinyFamily]:
    """Return Qwen3-VL and Qwen3-VL-MoE, whose towers add features to the first `num_deepstack` language layers."""
    processor = qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor")
    configs = {"qwen3_vl": _qwen3_vl_config, "qwen3_vl_moe": _qwen3_vl_moe_config}
    return {
        name: TinyFamily(SPECIAL_TOKENS, partial(config, num_deepstack=num_deepstack), processor)
        for name, config in configs.items()
    }


QWEN: dict[str, TinyFamily] = {
    "qwen2_vl": TinyFamily(
        SPECIAL_TOKENS, _qwen2_vl_config, qwen_processor("Qwen2VLProcessor", "Qwen2VLVideoProcessor")
    ),
    "qwen2_5_vl": TinyFamily(
        SPECIAL_TOKENS, _qwen2_5_vl_config, qwen_processor("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")
    ),
    **qwen3_vl(num_deepstack=1),
}
