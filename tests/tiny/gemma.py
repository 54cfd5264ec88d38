"""PaliGemma 1 and 2, and Gemma 4 in its forms, also without a vision tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import Resolution, TinyFamily, chat_template, hf_class, text_sizes
from rl_vlm.tiny.gemma import SIGLIP, sliding_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

_PALIGEMMA_RESOLUTION = Resolution(16, 4)
_PALIGEMMA_TOKENS = {"bos_token": "<bos>", "image_token": "<image>"}
_GEMMA4_TOKENS = {
    "boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>",
    "boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>",
}  # fmt: skip


def capped_sizes(tokenizer: Any, hidden_size: int, model_type: str) -> dict[str, Any]:
    """Return `sliding_sizes` with soft caps so low that they show."""
    return sliding_sizes(tokenizer, hidden_size, model_type) | {
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.5,
    }


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
