"""The thinkers of Qwen2.5-Omni and Qwen3-Omni, which read audio too. Their audio towers are as small as can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, layer_sizes, mrope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

_TOKENS = {
    "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}  # fmt: skip
_AUDIO: dict[str, Any] = {
    "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 16, "d_model": 16,
    "max_source_positions": 100, "n_window": 50,
}  # fmt: skip


def _text_sizes(tokenizer: Any, hidden_size: int) -> dict[str, Any]:
    """Return sizes with heads of 32."""
    heads = {"num_attention_heads": max(1, hidden_size // 32), "num_key_value_heads": 1, "bos_token_id": None}
    return layer_sizes(tokenizer, hidden_size) | heads | {"rope_parameters": mrope(16)}


def _ids(tokenizer: Any) -> dict[str, Any]:
    names = {"vision_bos": "vision_start", "vision_eos": "vision_end", "audio_bos": "audio_start"}
    kinds = {kind: kind for kind in ("image", "video", "audio")}
    return {f"{to}_token_id": getattr(tokenizer, f"{name}_token_id") for name, to in (kinds | names).items()}


def _qwen2_5_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4,
        "window_size": 32, "out_hidden_size": hidden_size, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return hf_class("Qwen2_5OmniThinkerConfig")(
        text_config=_text_sizes(tokenizer, hidden_size) | {"tie_word_embeddings": False},
        vision_config=vision,
        audio_config=_AUDIO | {"output_dim": hidden_size},
        **_ids(tokenizer),
    )


def _qwen3_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": hidden_size, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    audio = {"output_dim": hidden_size, "downsample_hidden_size": 4, "n_window_infer": 50, "conv_chunksize": 8}
    return hf_class("Qwen3OmniMoeThinkerConfig")(
        text_config=_text_sizes(tokenizer, hidden_size) | experts,
        vision_config=vision,
        audio_config=_AUDIO | audio,
        **_ids(tokenizer),
    )


def _processor(processor_class: str) -> Callable[[Any], ProcessorMixin]:
    def build(tokenizer: Any) -> ProcessorMixin:
        sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2}
        return hf_class(processor_class)(
            image_processor=hf_class("Qwen2VLImageProcessor")(**sizes, min_pixels=8**2, max_pixels=64**2),
            video_processor=hf_class("Qwen2VLVideoProcessor")(**sizes),
            feature_extractor=hf_class("WhisperFeatureExtractor")(feature_size=16),
            tokenizer=tokenizer,
            chat_template=chat_template("<|vision_bos|><|IMAGE|><|vision_eos|>"),
        )

    return build


OMNI: dict[str, TinyFamily] = {
    "qwen2_5_omni_thinker": TinyFamily(
        tuple(_TOKENS.values()), _qwen2_5_config, _processor("Qwen2_5OmniProcessor"), _TOKENS
    ),
    "qwen3_omni_moe_thinker": TinyFamily(
        tuple(_TOKENS.values()), _qwen3_config, _processor("Qwen3OmniMoeProcessor"), _TOKENS
    ),
}
