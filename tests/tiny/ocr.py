"""GOT-OCR2 and Perception-LM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, text_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

_PERCEPTION_TOKENS = {"image_token": "<|image|>", "video_token": "<|video|>"}


def _got_ocr2_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use 64 x 64 patches, since the processor counts 256 tokens an image whatever its size."""
    vision = {
        "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 16,
        "image_size": 128, "patch_size": 2, "window_size": 8, "global_attn_indexes": [], "initializer_range": 0.02,
    }  # fmt: skip
    return hf_class("GotOcr2Config")(
        text_config=text_sizes(tokenizer, hidden_size, "qwen2"),
        vision_config=vision,
        image_seq_length=256,
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"),
    )


def _got_ocr2_processor(tokenizer: Any) -> ProcessorMixin:
    """Build the processor as published, without a chat template."""
    image_processor = hf_class("GotOcr2ImageProcessor")(size={"height": 128, "width": 128})
    return hf_class("GotOcr2Processor")(image_processor=image_processor, tokenizer=tokenizer)


def _perception_lm_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    encoder = {
        "embed_dim": 48, "num_heads": 4, "depth": 1, "img_size": [16, 16], "patch_size": 4, "ref_feat_shape": [4, 4],
        "global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1,
    }  # fmt: skip
    return hf_class("PerceptionLMConfig")(
        text_config=text_sizes(tokenizer, hidden_size, "llama"),
        vision_config={"architecture": "vit_pe_core_large_patch14_336", "model_args": encoder},
        projector_pooling_ratio=2,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
    )


def _perception_lm_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("PerceptionLMProcessor")(
        video_processor=hf_class("PerceptionLMVideoProcessor")(size={"height": 16, "width": 16}),
        image_processor=hf_class("PerceptionLMImageProcessor")(tile_size=16, max_num_tiles=4),
        tokenizer=tokenizer,
        patch_size=4,
        pooling_ratio=2,
        chat_template=chat_template("<|image|>", "<|video|>"),
    )


OCR: dict[str, TinyFamily] = {
    "got_ocr2": TinyFamily(("<img>", "</img>", "<imgpad>"), _got_ocr2_config, _got_ocr2_processor),
    "perception_lm": TinyFamily(
        tuple(_PERCEPTION_TOKENS.values()), _perception_lm_config, _perception_lm_processor, _PERCEPTION_TOKENS
    ),
}
