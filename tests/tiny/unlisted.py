"""Tiny models of types that have no row in `FAMILIES`, from their own config and processor classes."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig, ProcessorMixin

from rl_vlm.tiny.family import TinyFamily, chat_template, layer_sizes, text_sizes, vision_sizes
from rl_vlm.tiny.gemma import SIGLIP
from rl_vlm.tiny.internvl import INTERNVL, INTERNVL_TOKENS, ONE_TILE
from rl_vlm.tiny.qwen import QWEN, qwen_processor, token_ids
from rl_vlm.tiny.qwen import SPECIAL_TOKENS as QWEN_TOKENS
from tests.tiny.glm import GLM
from tests.tiny.llava import GRIDS, PIXTRAL_TOKENS, TILE
from tests.tiny.rare import RARE
from tests.tiny.tiles import TOKENS_PER_TILE

IMAGE, VIDEO = "<image>", "<video>"
SIGLIP_TOWER = SIGLIP | {"model_type": "siglip_vision_model"}
CLIP_TOWER = vision_sizes(patch_size=4, image_size=16) | {"model_type": "clip_vision_model"}


def renamed(parts: TinyFamily, config_class: str) -> TinyFamily:
    """Return a tiny model whose config has the fields of a family's and another class."""

    def config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
        fields = parts.config(tokenizer, hidden_size).to_dict()
        names = ("model_type", "architectures", "transformers_version")
        return getattr(transformers, config_class)(**{k: v for k, v in fields.items() if k not in names})

    return TinyFamily(parts.special_tokens, config, parts.processor, parts.token_names, parts.after_init)


def llava_like(config_class: str, image_processor: Any, **fields: Any) -> TinyFamily:
    """Return a tiny model of CLIP's tower, a projector and a Llama, with one token per patch."""

    def config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
        ids = tokenizer.convert_tokens_to_ids
        return getattr(transformers, config_class)(
            text_config=text_sizes(tokenizer, hidden_size, "llama"), vision_config=CLIP_TOWER,
            image_token_index=ids(IMAGE), video_token_index=ids(VIDEO), image_seq_length=16, **fields,
        )  # fmt: skip

    def processor(tokenizer: Any) -> ProcessorMixin:
        return transformers.LlavaProcessor(
            image_processor=image_processor(), tokenizer=tokenizer, patch_size=4, chat_template=chat_template(IMAGE),
            vision_feature_select_strategy="default", num_additional_image_tokens=1,
        )  # fmt: skip

    return TinyFamily((IMAGE, VIDEO), config, processor)


def clip_images() -> Any:
    return transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=TILE)


def llava_next_video_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    ids = tokenizer.convert_tokens_to_ids
    return transformers.LlavaNextVideoConfig(
        text_config=text_sizes(tokenizer, hidden_size, "llama"),
        vision_config=vision_sizes(patch_size=8, image_size=16) | {"model_type": "clip_vision_model"},
        image_token_index=ids(IMAGE), video_token_index=ids(VIDEO), image_seq_length=4, image_grid_pinpoints=GRIDS,
    )  # fmt: skip


def llava_next_video_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.LlavaNextVideoProcessor(
        image_processor=transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 16}, crop_size=TILE, image_grid_pinpoints=GRIDS
        ),
        video_processor=transformers.LlavaNextVideoVideoProcessor(size={"shortest_edge": 16}, crop_size=TILE),
        tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=chat_template(IMAGE),
    )  # fmt: skip


def lighton_ocr_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    return transformers.LightOnOcrConfig(
        text_config=text_sizes(tokenizer, hidden_size, "qwen3"),
        vision_config=vision_sizes(patch_size=4, image_size=32, num_layers=1) | {"model_type": "pixtral"},
        image_token_id=tokenizer.image_token_id,
    )


def lighton_ocr_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.LightOnOcrProcessor(
        image_processor=transformers.PixtralImageProcessor(size={"longest_edge": 32}, patch_size=8),
        tokenizer=tokenizer, patch_size=4, spatial_merge_size=2, chat_template=chat_template("[IMG]"),
    )  # fmt: skip


def qianfan_ocr_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    vision = vision_sizes(ONE_TILE.patch_size(merged=2), ONE_TILE.side, num_layers=1)
    return transformers.QianfanOCRConfig(
        text_config=text_sizes(tokenizer, hidden_size, "qwen3"),
        vision_config=vision | {"drop_path_rate": 0.0},
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=TOKENS_PER_TILE,
    )


def qianfan_ocr_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.QianfanOCRProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size=TILE, crop_to_patches=True, max_patches=4),
        tokenizer=tokenizer, image_seq_length=TOKENS_PER_TILE, chat_template=chat_template(IMAGE),
    )  # fmt: skip


def cosmos3_edge_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    vision = vision_sizes(patch_size=4, image_size=32, num_layers=1)
    text = layer_sizes(tokenizer, hidden_size) | {
        "head_dim": hidden_size // 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
        "mrope_section": [hidden_size // 8 - 2 * (hidden_size // 32), hidden_size // 32, hidden_size // 32]},
    }  # fmt: skip
    return transformers.Cosmos3EdgeConfig(
        text_config=text, vision_config=vision | {"num_patches": 64}, projector_hidden_size=64, **token_ids(tokenizer)
    )


def cosmos3_edge_processor(tokenizer: Any) -> ProcessorMixin:
    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    return transformers.Cosmos3EdgeProcessor(
        image_processor=transformers.Cosmos3EdgeImageProcessor(**sizes), tokenizer=tokenizer,
        video_processor=transformers.Cosmos3EdgeVideoProcessor(**sizes),
        chat_template=chat_template("<|vision_start|><|image_pad|><|vision_end|>"),
    )  # fmt: skip


def cosmos3_omni_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    parts = QWEN["qwen3_vl"].config(tokenizer, hidden_size)
    return transformers.Cosmos3OmniConfig(
        text_config=parts.text_config, vision_config=parts.vision_config, **token_ids(tokenizer)
    )


def aria_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    text = text_sizes(tokenizer, hidden_size, "aria_text") | {
        "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": hidden_size,
    }  # fmt: skip
    # The processor makes images of 490 or 980 pixels.
    vision = vision_sizes(patch_size=70, image_size=980, num_layers=1) | {"model_type": "idefics3_vision"}
    return transformers.AriaConfig(
        text_config=text, vision_config=vision, image_token_index=tokenizer.image_token_id,
        projector_patch_to_query_dict={49: 4, 196: 8},
    )  # fmt: skip


def aria_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.AriaProcessor(
        image_processor=transformers.AriaImageProcessor(max_image_size=490), tokenizer=tokenizer,
        size_conversion={490: 4, 980: 8}, chat_template=chat_template(IMAGE),
    )  # fmt: skip


def idefics2_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    return transformers.Idefics2Config(
        text_config=text_sizes(tokenizer, hidden_size, "mistral"),
        vision_config=vision_sizes(patch_size=4, image_size=32, num_layers=1),
        perceiver_config={
            "hidden_size": hidden_size, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
            "resampler_head_dim": 16, "num_key_value_heads": 2,
        },
        image_token_id=tokenizer.image_token_id,
    )  # fmt: skip


def idefics2_processor(tokenizer: Any) -> ProcessorMixin:
    size = {"shortest_edge": 16, "longest_edge": 32}
    return transformers.Idefics2Processor(
        image_processor=transformers.Idefics2ImageProcessor(size=size, do_image_splitting=False),
        tokenizer=tokenizer, image_seq_len=4, chat_template=chat_template(IMAGE),
    )  # fmt: skip


def janus_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    vision = {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
        "mlp_ratio": 2.0, "projection_dim": hidden_size, "num_image_tokens": 16,
    }  # fmt: skip
    vq = {
        "embed_dim": 8, "num_embeddings": 16, "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1],
        "num_res_blocks": 1, "num_patches": 4, "projection_dim": hidden_size, "image_token_embed_dim": hidden_size,
    }  # fmt: skip
    return transformers.JanusConfig(
        text_config=text_sizes(tokenizer, hidden_size, "llama"), vision_config=vision, vq_config=vq,
        image_token_id=tokenizer.image_token_id,
    )  # fmt: skip


def janus_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.JanusProcessor(
        image_processor=transformers.JanusImageProcessor(size=TILE), tokenizer=tokenizer, num_image_tokens=16,
        chat_template=chat_template("<image_placeholder>"),
    )  # fmt: skip


def deepseek_vl_hybrid_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    sam = {
        "model_type": "sam_vision_model", "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "output_channels": 16, "image_size": 64, "patch_size": 4, "window_size": 8,
        "global_attn_indexes": [1],
    }  # fmt: skip
    return transformers.DeepseekVLHybridConfig(
        text_config=text_sizes(tokenizer, hidden_size, "llama"), vision_config=SIGLIP_TOWER, high_res_vision_config=sam,
        image_token_id=tokenizer.image_token_id,
    )  # fmt: skip


def deepseek_vl_hybrid_processor(tokenizer: Any) -> ProcessorMixin:
    high = {"height": 64, "width": 64}
    return transformers.DeepseekVLHybridProcessor(
        image_processor=transformers.DeepseekVLHybridImageProcessor(size=TILE, high_res_size=high),
        tokenizer=tokenizer, num_image_tokens=16, chat_template=chat_template("<image_placeholder>"),
    )  # fmt: skip


def muse_glimmer_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    ids = tokenizer.convert_tokens_to_ids
    text = layer_sizes(tokenizer, hidden_size) | {
        "head_dim": hidden_size // 4, "bos_token_id": None, "sliding_window": 8, "num_hidden_layers": 4,
    }  # fmt: skip
    vision = vision_sizes(patch_size=4, image_size=32, num_layers=4)
    del vision["image_size"]
    return transformers.MuseGlimmerConfig(
        text_config=text, vision_config=vision | {"pos_emb_height": 8, "pos_emb_width": 8},
        image_token_id=ids("<|patch|>"), video_token_id=ids("<|video|>"), out_hidden_size=256, projector_hidden_size=64,
    )  # fmt: skip


def muse_glimmer_processor(tokenizer: Any) -> ProcessorMixin:
    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2}
    images: dict[str, Any] = sizes | {"max_image_tokens": 16}
    return transformers.MuseGlimmerProcessor(
        image_processor=transformers.MuseGlimmerImageProcessor(**images), tokenizer=tokenizer,
        video_processor=transformers.MuseGlimmerVideoProcessor(**sizes), chat_template=chat_template("<|patch|>"),
    )  # fmt: skip


def hybrid_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Return a type without a row over a language model with Mamba layers, which carry a state."""
    ids = tokenizer.convert_tokens_to_ids
    text = text_sizes(tokenizer, hidden_size, "bamba") | {
        "attn_layer_indices": [1], "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16,
    }  # fmt: skip
    return transformers.VipLlavaConfig(
        text_config=text, vision_config=CLIP_TOWER, image_token_index=ids(IMAGE), image_seq_length=16,
        vision_feature_layers=[-1, -2],
    )  # fmt: skip


MUSE_TOKENS = (
    "<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>", "<|vid_frame_separator|>", "<|vid_start|>",
    "<|vid_end|>",
)  # fmt: skip
PIXTRAL_NAMES = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
DEEPSEEK_NAMES = {"image_token": "<image_placeholder>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
INTERNVL_NAMES = INTERNVL["internvl"].token_names
IDEFICS2_NAMES = {"image_token": IMAGE, "image_boundary_token": "<fake>"}
QWEN3_PROCESSOR = qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor")

UNLISTED: dict[str, TinyFamily] = {
    "vipllava": llava_like("VipLlavaConfig", clip_images, vision_feature_layers=[-1, -2]),
    "llava_next_video": TinyFamily((IMAGE, VIDEO), llava_next_video_config, llava_next_video_processor),
    "lighton_ocr": TinyFamily(PIXTRAL_TOKENS, lighton_ocr_config, lighton_ocr_processor, PIXTRAL_NAMES),
    "qianfan_ocr": TinyFamily((*INTERNVL_TOKENS, IMAGE), qianfan_ocr_config, qianfan_ocr_processor, INTERNVL_NAMES),
    "cosmos3_edge": TinyFamily(QWEN_TOKENS, cosmos3_edge_config, cosmos3_edge_processor),
    "cosmos3_omni": TinyFamily(QWEN_TOKENS, cosmos3_omni_config, QWEN3_PROCESSOR),
    "aria": TinyFamily((IMAGE,), aria_config, aria_processor, {"image_token": IMAGE}),
    "idefics2": TinyFamily((IMAGE, "<fake>"), idefics2_config, idefics2_processor, IDEFICS2_NAMES),
    "janus": TinyFamily(tuple(DEEPSEEK_NAMES.values()), janus_config, janus_processor, DEEPSEEK_NAMES),
    "deepseek_vl_hybrid": TinyFamily(
        tuple(DEEPSEEK_NAMES.values()), deepseek_vl_hybrid_config, deepseek_vl_hybrid_processor, DEEPSEEK_NAMES
    ),
    "muse_glimmer": TinyFamily(MUSE_TOKENS, muse_glimmer_config, muse_glimmer_processor),
    "hybrid": TinyFamily((IMAGE, VIDEO), hybrid_config, llava_like("VipLlavaConfig", clip_images).processor),
    "glmga": renamed(GLM["glm46v"], "GlmgaConfig"),
    **RARE,
}

REFUSED = {
    "shieldgemma2": "the model's processor returned 3 prompts instead of one",
    "fuyu": "processor refuses it: StopIteration",
    "emu3": "Trained weights: no trained weight of the vision tower has a gradient",
    "blip-2": "have 5 image placeholders, but the images became 4 features",
    "instructblip": "have 5 image placeholders, but the images became 4 features",
}
"""Types that cannot be trained, with a part of the reason.

A classifier's processor writes one prompt per policy, others write the places of images themselves, and a tower chooses
tokens of a vocabulary.
"""
