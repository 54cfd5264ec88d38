"""PaliGemma 1 and 2, Gemma 3, and Gemma 4 in its forms, also without a vision tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import Resolution, TinyFamily, chat_template, hf_class, text_sizes, vision_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

SLIDING_WINDOW = 8
"""Shorter than an image, so that the sliding layers' mask shows."""

_GEMMA3_RESOLUTION, _PALIGEMMA_RESOLUTION = Resolution(32, 4), Resolution(16, 4)
SIGLIP = vision_sizes(patch_size=4, image_size=16, num_layers=1) | {"vision_use_head": False}
"""SigLIP without the pooling head, which no family uses."""


def sliding_sizes(tokenizer: Any, hidden_size: int, model_type: str, num_layers: int = 2) -> dict[str, Any]:
    """Return sizes of layers with a sliding window and with full attention, in turn."""
    return text_sizes(tokenizer, hidden_size, model_type) | {
        "num_hidden_layers": num_layers,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "sliding_window": SLIDING_WINDOW,
    }


def capped_sizes(tokenizer: Any, hidden_size: int, model_type: str) -> dict[str, Any]:
    """Return `sliding_sizes` with soft caps so low that they show."""
    return sliding_sizes(tokenizer, hidden_size, model_type) | {
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.5,
    }


def _gemma3_config(tokenizer: Any, hidden_size: int, resolution: Resolution = _GEMMA3_RESOLUTION) -> PreTrainedConfig:
    vision = {"image_size": resolution.side, "patch_size": resolution.patch_size(merged=2)}
    return hf_class("Gemma3Config")(
        text_config=sliding_sizes(tokenizer, hidden_size, "gemma3_text") | {"query_pre_attn_scalar": hidden_size // 4},
        vision_config=SIGLIP | vision,
        mm_tokens_per_image=resolution.num_tokens,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )


def _gemma3_processor(tokenizer: Any, resolution: Resolution = _GEMMA3_RESOLUTION) -> ProcessorMixin:
    return hf_class("Gemma3Processor")(
        image_processor=hf_class("Gemma3ImageProcessor")(size=resolution.size),
        tokenizer=tokenizer,
        image_seq_length=resolution.num_tokens,
        chat_template=chat_template("<start_of_image>"),
    )


def _random_projector(model: PreTrainedModel) -> None:
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=model.config.initializer_range)


def _paligemma_config(
    text_model: str, sizes: Callable[[Any, int, str], dict[str, Any]]
) -> Callable[..., PreTrainedConfig]:
    def build(tokenizer: Any, hidden_size: int, resolution: Resolution = _PALIGEMMA_RESOLUTION) -> PreTrainedConfig:
        _paligemma_processor(tokenizer)  # adds a thousand tokens for locations and segments
        return hf_class("PaliGemmaConfig")(
            text_config=sizes(tokenizer, hidden_size, text_model),
            vision_config=SIGLIP | {"image_size": resolution.side, "patch_size": resolution.patch_size()},
            image_token_index=tokenizer.image_token_id,
            projection_dim=hidden_size,
            hidden_size=hidden_size,
        )

    return build


def _paligemma_processor(tokenizer: Any, resolution: Resolution = _PALIGEMMA_RESOLUTION) -> ProcessorMixin:
    """Build the processor as published, without a chat template."""
    image_processor = hf_class("SiglipImageProcessor")(size=resolution.size, image_seq_length=resolution.num_tokens)
    return hf_class("PaliGemmaProcessor")(image_processor=image_processor, tokenizer=tokenizer)


def _gemma4_config(num_layers: int, **text: Any) -> Callable[[Any, int], PreTrainedConfig]:
    def build(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
        vision = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
            "position_embedding_size": 256,
        }  # fmt: skip
        sizes = {
            "intermediate_size": 2 * hidden_size,
            "global_head_dim": hidden_size // 2,
            "vocab_size_per_layer_input": len(tokenizer),
            "final_logit_softcapping": 30.0,
        }
        return hf_class("Gemma4Config")(
            text_config=sliding_sizes(tokenizer, hidden_size, "gemma4_text", num_layers) | sizes | text,
            vision_config=vision,
            **_gemma4_ids(tokenizer),
        )

    return build


def _gemma4_ids(tokenizer: Any) -> dict[str, Any]:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("boi", "eoi", "image", "audio")}
    more = {"boa_token_id": tokenizer.boa_token_id, "eoa_token_index": tokenizer.eoa_token_id}
    return ids | more | {"video_token_id": tokenizer.convert_tokens_to_ids("<|video|>")}


def _gemma4_unified_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Let patches of 8 x 8 pixels be the tokens, and give it the layer that would embed audio."""
    sizes = {"intermediate_size": 2 * hidden_size, "global_head_dim": hidden_size // 2}
    text = sliding_sizes(tokenizer, hidden_size, "gemma4_unified_text") | sizes | {"final_logit_softcapping": 30.0}
    vision = {
        "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 64, "mm_posemb_size": 32, "output_proj_dims": 64,
    }  # fmt: skip
    audio = {"audio_embed_dim": 16, "output_proj_dims": 16}
    return hf_class("Gemma4UnifiedConfig")(
        text_config=text, vision_config=vision, audio_config=audio, **_gemma4_ids(tokenizer)
    )


def _random_places(model: PreTrainedModel) -> None:
    model.model.embed_vision.pos_embedding.data.normal_(std=model.config.initializer_range)


def _gemma4_processor(version: str) -> Callable[[Any], ProcessorMixin]:
    def build(tokenizer: Any) -> ProcessorMixin:
        sizes: dict[str, Any] = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
        return hf_class(f"{version}Processor")(
            feature_extractor=hf_class(f"{version}AudioFeatureExtractor")(),
            image_processor=hf_class(f"{version}ImageProcessor")(**sizes),
            tokenizer=tokenizer,
            video_processor=hf_class(f"{version}VideoProcessor")(**sizes),
            chat_template=chat_template("<|image|>", "<|video|>"),
        )

    return build


_PALIGEMMA_TOKENS = {"bos_token": "<bos>", "image_token": "<image>"}
_GEMMA3_TOKENS = {
    "boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>",
}  # fmt: skip
_GEMMA4_TOKENS = {
    "boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>",
    "boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>",
}  # fmt: skip


def _gemma4(num_layers: int, **text: Any) -> TinyFamily:
    return TinyFamily(
        (*_GEMMA4_TOKENS.values(), "<|video|>"),
        _gemma4_config(num_layers, **text),
        _gemma4_processor("Gemma4"),
        _GEMMA4_TOKENS,
    )


def _paligemma(text_model: str, sizes: Callable[[Any, int, str], dict[str, Any]]) -> TinyFamily:
    config = _paligemma_config(text_model, sizes)
    return TinyFamily(
        tuple(_PALIGEMMA_TOKENS.values()), config, _paligemma_processor, _PALIGEMMA_TOKENS, is_resizable=True
    )


GEMMA: dict[str, TinyFamily] = {
    "gemma3": TinyFamily(
        tuple(_GEMMA3_TOKENS.values()), _gemma3_config, _gemma3_processor, _GEMMA3_TOKENS, _random_projector,
        is_resizable=True,
    ),
    "paligemma": _paligemma("gemma", text_sizes),
    "paligemma2": _paligemma("gemma2", capped_sizes),
    "gemma4": _gemma4(4, hidden_size_per_layer_input=8, num_kv_shared_layers=2),
    "gemma4_bidirectional": _gemma4(2, hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
    "gemma4_unified": TinyFamily(
        (*_GEMMA4_TOKENS.values(), "<|video|>"), _gemma4_unified_config, _gemma4_processor("Gemma4Unified"),
        _GEMMA4_TOKENS, _random_places,
    ),
    "gemma4_moe": _gemma4(
        2, hidden_size_per_layer_input=0, use_bidirectional_attention="vision", attention_k_eq_v=True,
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=64, num_global_key_value_heads=1,
    ),
}  # fmt: skip
