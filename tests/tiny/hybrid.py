"""Families with attention and recurrent layers: Qwen3.5 dense and MoE, LFM2-VL, MiniCPM-V 4.6 and 4.7."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny import qwen
from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, text_sizes
from rl_vlm.tiny.gemma import SIGLIP

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

_LFM2_TOKENS = {
    "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}  # fmt: skip
_MINICPM_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip


def gated_delta_sizes(tokenizer: Any, hidden_size: int, model_type: str) -> dict[str, Any]:
    """Return sizes of a gated-delta layer and one of attention; half of each attention head's width is rotated."""
    frequencies = hidden_size // 16
    height_width = frequencies // 3
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
        "mrope_section": [frequencies - 2 * height_width, height_width, height_width],
    }  # fmt: skip
    return text_sizes(tokenizer, hidden_size, model_type) | {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rope_parameters": rope,
    }  # fmt: skip


def _qwen3_5_config(config_class: str, text_model: str, **text: Any) -> Callable[[Any, int], PreTrainedConfig]:
    def build(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
        vision = {
            "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4,
            "out_hidden_size": hidden_size, "num_position_embeddings": 64,
        }  # fmt: skip
        return hf_class(config_class)(
            text_config=gated_delta_sizes(tokenizer, hidden_size, text_model) | text,
            vision_config=vision,
            **qwen.token_ids(tokenizer),
        )

    return build


def _lfm2_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    text = text_sizes(tokenizer, hidden_size, "lfm2") | {
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    }
    vision = SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 64}
    return hf_class("Lfm2VlConfig")(
        text_config=text,
        vision_config=vision,
        projector_hidden_size=2 * hidden_size,
        image_token_id=tokenizer.image_token_id,
    )


def _lfm2_vl_processor(tokenizer: Any) -> ProcessorMixin:
    image_processor = hf_class("Lfm2VlImageProcessor")(
        encoder_patch_size=4, tile_size=32, min_image_tokens=4, max_image_tokens=16, max_tiles=4,
        return_row_col_info=True,
    )  # fmt: skip
    return hf_class("Lfm2VlProcessor")(
        image_processor=image_processor, tokenizer=tokenizer, chat_template=chat_template("<image>")
    )


def _minicpm_config(config_class: str, marks: bool) -> Callable[[Any, int], PreTrainedConfig]:
    """Return a function that builds the config.

    With `marks` the config holds the ids of the marks around crops, from which positions are made.
    """

    def build(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
        ids = {"image_token_id": tokenizer.image_token_id, "video_token_id": tokenizer.video_token_id}
        if marks:
            names = ("image_start", "image_end", "slice_start", "slice_end")
            ids |= {f"{name}_id": getattr(tokenizer, f"{name}_token_id") for name in names}
            ids["newline_id"] = tokenizer.encode("\n")[0]
        vision = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 32,
        }  # fmt: skip
        return hf_class(config_class)(
            text_config=gated_delta_sizes(tokenizer, hidden_size, "qwen3_5_text"),
            vision_config=vision,
            insert_layer_id=0,
            image_size=32,
            **ids,
        )

    return build


def _minicpm_processor(processor_class: str) -> Callable[[Any], ProcessorMixin]:
    def build(tokenizer: Any) -> ProcessorMixin:
        sizes: dict[str, Any] = {"patch_size": 4, "scale_resolution": 32, "max_slice_nums": 4}
        return hf_class(processor_class)(
            image_processor=hf_class("MiniCPMV4_6ImageProcessor")(**sizes),
            video_processor=hf_class("MiniCPMV4_6VideoProcessor")(**sizes),
            tokenizer=tokenizer,
            chat_template=chat_template("<|image_pad|>", "<|video_pad|>"),
        )

    return build


def slow_decay(model: PreTrainedModel) -> None:
    """Let states reach over a prompt, as those of trained models do.

    With the usual initial decay of up to exp(-21) per token, a completion's state hardly depends on its prompt.
    Gradients of the decay are then sums that cancel, which rounding in fp32 moves by up to 4e-5.
    """
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            parameter.data = torch.linspace(0.01, 0.3, len(parameter)).log()


def _qwen3_5(config_class: str, text_model: str, **text: Any) -> TinyFamily:
    processor = qwen.qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor")
    return TinyFamily(
        qwen.SPECIAL_TOKENS, _qwen3_5_config(config_class, text_model, **text), processor, after_init=slow_decay
    )


def _minicpm(version: str, marks: bool) -> TinyFamily:
    config = _minicpm_config(f"MiniCPMV{version}Config", marks)
    return TinyFamily(
        tuple(_MINICPM_TOKENS.values()),
        config,
        _minicpm_processor(f"MiniCPMV{version}Processor"),
        _MINICPM_TOKENS,
        after_init=slow_decay,
    )


HYBRID: dict[str, TinyFamily] = {
    "qwen3_5": _qwen3_5("Qwen3_5Config", "qwen3_5_text"),
    "qwen3_5_moe": _qwen3_5(
        "Qwen3_5MoeConfig", "qwen3_5_moe_text", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "lfm2_vl": TinyFamily(tuple(_LFM2_TOKENS.values()), _lfm2_vl_config, _lfm2_vl_processor, _LFM2_TOKENS),
    "minicpmv4_6": _minicpm("4_6", marks=False),
    "minicpmv4_7": _minicpm("4_7", marks=True),
}  # fmt: skip
