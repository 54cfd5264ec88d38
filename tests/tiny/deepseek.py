"""DeepSeek-VL, and Kimi K2.5 on DeepSeek V3's language model (latent attention and experts)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, text_sizes
from rl_vlm.tiny.gemma import SIGLIP

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

_KIMI_TOKENS = (
    "<|media_pad|>", "<|kimi_k25_video_placeholder|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>",
)  # fmt: skip


def _deepseek_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    return hf_class("DeepseekVLConfig")(
        text_config=text_sizes(tokenizer, hidden_size, "llama"),
        vision_config=SIGLIP,
        image_token_id=tokenizer.image_token_id,
    )


def _deepseek_vl_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("DeepseekVLProcessor")(
        image_processor=hf_class("DeepseekVLImageProcessor")(size={"height": 16, "width": 16}, min_size=4),
        tokenizer=tokenizer,
        num_image_tokens=16,
        chat_template=chat_template("<image_placeholder>"),
    )


def _kimi_k25_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    latent = {
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "head_dim": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    experts = {
        "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 1, "moe_intermediate_size": 64,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8,
    }  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids
    return hf_class("Kimi_K25Config")(
        text_config=text_sizes(tokenizer, hidden_size, "deepseek_v3") | latent | experts,
        vision_config=vision,
        projection_hidden_size=32,
        image_token_id=ids("<|media_pad|>"),
        video_token_id=ids("<|kimi_k25_video_placeholder|>"),
        vision_start_token_id=ids("<|media_begin|>"),
        vision_end_token_id=ids("<|media_end|>"),
    )


def _strong_patches(model: PreTrainedModel) -> None:
    """Give patches large values: the tower adds times to them and takes the mean over frames, which would hide them."""
    weight = model.model.vision_tower.patch_embed.proj.weight
    weight.data.normal_(std=8 * weight[0].numel() ** -0.5)


def _kimi_k25_processor(tokenizer: Any) -> ProcessorMixin:
    sizes: dict[str, Any] = {"patch_size": 4, "size": {"max_height": 64, "max_width": 64}}
    return hf_class("Kimi_K25Processor")(
        image_processor=hf_class("Kimi_K25ImageProcessor")(**sizes, max_patches=128),
        tokenizer=tokenizer,
        video_processor=hf_class("Kimi_K25VideoProcessor")(**sizes),
        chat_template=chat_template(
            "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", "<|kimi_k25_video_placeholder|>"
        ),
    )


DEEPSEEK: dict[str, TinyFamily] = {
    "deepseek_vl": TinyFamily(
        ("<image_placeholder>",), _deepseek_vl_config, _deepseek_vl_processor, {"image_token": "<image_placeholder>"}
    ),
    "kimi_k25": TinyFamily(_KIMI_TOKENS, _kimi_k25_config, _kimi_k25_processor, after_init=_strong_patches),
}
