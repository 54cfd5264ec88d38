"""Families whose layers attend to some blocks of tokens: Llama 4 (chunks), MiniMax M3 and Qwen4-Exp (indexers)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny import qwen
from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, text_sizes
from tests.tiny.hybrid import gated_delta_sizes, slow_decay

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

_LLAMA_TOKENS = (
    "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
)  # fmt: skip
_MINIMAX_TOKENS = ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
_PIXELS: dict[str, Any] = {"size": {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}}


def _llama4_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use chunks shorter than an image, and attention that soon becomes sharper along a row."""
    text = text_sizes(tokenizer, hidden_size, "llama4_text") | {
        "intermediate_size": hidden_size, "intermediate_size_mlp": hidden_size, "no_rope_layers": [1, 0],
        "attention_chunk_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "floor_scale": 4, "attn_scale": 0.5,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 16, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids
    return hf_class("Llama4Config")(
        text_config=text,
        vision_config=vision,
        image_token_index=ids("<|patch|>"),
        boi_token_index=ids("<|image_start|>"),
        eoi_token_index=ids("<|image_end|>"),
    )


def _llama4_processor(tokenizer: Any) -> ProcessorMixin:
    tile: dict[str, Any] = {"size": {"height": 16, "width": 16}, "max_patches": 4}
    return hf_class("Llama4Processor")(
        image_processor=hf_class("Llama4ImageProcessor")(**tile),
        tokenizer=tokenizer,
        patch_size=4,
        chat_template=chat_template("<|image|>"),
    )


def _random_experts(model: PreTrainedModel) -> None:
    """Give experts random weights, if transformers leaves them at zero."""
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weight.data.normal_(std=model.config.initializer_range)


def _minimax_m3_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use a layer that attends to two of the blocks of four tokens, besides the last one, and one to all."""
    text = text_sizes(tokenizer, hidden_size, "") | {
        "layer_types": ["minimax_m3_sparse", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
        "dense_intermediate_size": 2 * hidden_size, "intermediate_size": 64, "shared_intermediate_size": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16, "index_n_heads": 2, "index_head_dim": 16,
        "index_block_size": 4, "index_topk_blocks": 3,
    }  # fmt: skip
    del text["model_type"]
    vision = {
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 64,
    }  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids
    return hf_class("MiniMaxM3VLConfig")(
        text_config=text,
        vision_config=vision,
        projector_hidden_size=hidden_size,
        image_token_index=ids(_MINIMAX_TOKENS[0]),
        video_token_index=ids(_MINIMAX_TOKENS[1]),
    )


def _minimax_m3_vl_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("MiniMaxM3VLProcessor")(
        image_processor=hf_class("MiniMaxM3VLImageProcessor")(patch_size=4, merge_size=2, **_PIXELS),
        tokenizer=tokenizer,
        video_processor=hf_class("MiniMaxM3VLVideoProcessor")(patch_size=4, merge_size=2),
        chat_template=chat_template(_MINIMAX_TOKENS[0]),
    )


def _qwen4_exp_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use embeddings of pairs of tokens in the first layer, and an indexer that selects 8 tokens in the second."""
    text = gated_delta_sizes(tokenizer, hidden_size, "qwen4_exp_text") | {
        "layer_types": ["linear_attention", "indexed_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "hc_count": 2, "hc_lowrank": 8,
        "ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_size": 2, "heads_per_ngram": 2, "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 24, "indexer_budget": 8, "indexer_compress_ratio": 4,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": hidden_size, "num_position_embeddings": 64,
    }  # fmt: skip
    return hf_class("Qwen4ExpConfig")(text_config=text, vision_config=vision, **qwen.token_ids(tokenizer))


SPARSE: dict[str, TinyFamily] = {
    "llama4": TinyFamily(_LLAMA_TOKENS, _llama4_config, _llama4_processor, after_init=_random_experts),
    "minimax_m3_vl": TinyFamily(_MINIMAX_TOKENS, _minimax_m3_vl_config, _minimax_m3_vl_processor),
    "qwen4_exp": TinyFamily(
        qwen.SPECIAL_TOKENS,
        _qwen4_exp_config,
        qwen.qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
        after_init=slow_decay,
    ),
}
