"""Tiny models of types without a row that few runs use: of one tower for images and one for videos, of experts, of
images as tokens of a vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, ProcessorMixin

from rl_vlm.tiny.family import TinyFamily, chat_template, layer_sizes, mrope, text_sizes, vision_sizes
from rl_vlm.tiny.gemma import GEMMA, sliding_sizes
from rl_vlm.tiny.qwen import QWEN, qwen_processor, token_ids
from rl_vlm.tiny.qwen import SPECIAL_TOKENS as QWEN_TOKENS
from tests.tiny.glm import SPECIAL_TOKENS as GLM_TOKENS
from tests.tiny.llava import LLAVA, TILE
from tests.tiny.ocr import OCR

IMAGE, VIDEO = "<image>", "<video>"
CLIP_TOWER = vision_sizes(patch_size=4, image_size=16) | {"model_type": "clip_vision_model"}


def video_llava_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    ids = tokenizer.convert_tokens_to_ids
    return transformers.VideoLlavaConfig(
        text_config=text_sizes(tokenizer, hidden_size, "llama"), vision_config=CLIP_TOWER,
        image_token_index=ids(IMAGE), video_token_index=ids(VIDEO), image_seq_length=16,
    )  # fmt: skip


def video_llava_processor(tokenizer: Any) -> ProcessorMixin:
    size: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": TILE}
    return transformers.VideoLlavaProcessor(
        image_processor=transformers.VideoLlavaImageProcessor(**size), tokenizer=tokenizer, patch_size=4,
        video_processor=transformers.VideoLlavaVideoProcessor(**size), chat_template=chat_template(IMAGE),
    )  # fmt: skip


def hyperclovax_config(tokenizer: Any, hidden_size: int, **text: Any) -> PreTrainedConfig:
    """Use multipliers other than 1, except for logits."""
    multipliers = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
    vision = QWEN["qwen2_5_vl"].config(tokenizer, hidden_size).vision_config.to_dict()
    return transformers.HyperCLOVAXVisionV2Config(
        text_config=text_sizes(tokenizer, hidden_size, "hyperclovax") | multipliers | text,
        vision_config=vision | {"model_type": "qwen2_5_vl_vision"},
        image_token_id=token_ids(tokenizer)["image_token_id"], video_token_id=token_ids(tokenizer)["video_token_id"],
    )  # fmt: skip


def hyperclovax_processor(tokenizer: Any) -> ProcessorMixin:
    tokenizer.add_prefix_space = False  # transformers loads it as GPT-2's, which needs the value
    return qwen_processor("HyperCLOVAXVisionV2Processor", "Qwen2VLVideoProcessor")(tokenizer)


def cohere_compass_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    vision = QWEN["qwen3_vl"].config(tokenizer, hidden_size).vision_config.to_dict()
    names = ("model_type", "transformers_version", "rope_parameters")
    text = layer_sizes(tokenizer, hidden_size) | {
        "bos_token_id": None, "logit_scale": 0.25, "rope_parameters": {"full_attention": mrope(hidden_size // 8)},
    }  # fmt: skip
    return transformers.CohereCompassConfig(
        text_config=text, vision_config={k: v for k, v in vision.items() if k not in names},
        **dict(zip(token_ids(tokenizer), tokenizer.convert_tokens_to_ids(list(COMPASS_TOKENS)), strict=True)),
    )  # fmt: skip


def cohere_compass_processor(tokenizer: Any) -> ProcessorMixin:
    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2}
    return transformers.CohereCompassProcessor(
        image_processor=transformers.CohereCompassImageProcessor(**sizes, min_pixels=64, max_pixels=4096),
        tokenizer=tokenizer, video_processor=transformers.CohereCompassVideoProcessor(**sizes),
        chat_template=chat_template("<|VISION_START|><|IMAGE_PAD|><|VISION_END|>"),
    )  # fmt: skip


def glm5_next_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use a layer with a state and a layer whose indexer selects two of the blocks of four tokens."""
    ids = dict(zip(GLM_TOKENS, tokenizer.convert_tokens_to_ids(list(GLM_TOKENS)), strict=True))
    text = layer_sizes(tokenizer, hidden_size) | {
        "num_key_value_heads": 4, "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "full"], "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16,
        "qk_nope_head_dim": 16, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 8, "index_kpool": 4,
        "linear_head_dim": 16, "linear_num_heads": 4, "hc_mult": 2, "hc_sinkhorn_iters": 4,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "image_size": 32, "intermediate_size": 64,
        "out_hidden_size": hidden_size, "projection_intermediate_size": 64,
    }  # fmt: skip
    return transformers.Glm5NextConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image|>"], video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"], image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"], video_end_token_id=ids["<|end_of_video|>"],
    )  # fmt: skip


def glm5_next_processor(tokenizer: Any) -> ProcessorMixin:
    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "min_image_tokens": 1, "max_image_tokens": 16}
    return transformers.Glm5NextProcessor(
        image_processor=transformers.Glm5NextImageProcessor(**sizes), tokenizer=tokenizer,
        video_processor=transformers.Glm5NextVideoProcessor(patch_size=4, merge_size=2),
        chat_template=chat_template("<|begin_of_image|><|image|><|end_of_image|>"),
    )  # fmt: skip


def inkling_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use short convolutions, which carry a state, and biases of attention by distance."""
    ids = tokenizer.convert_tokens_to_ids
    text = layer_sizes(tokenizer, hidden_size) | {
        "head_dim": hidden_size // 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "bos_token_id": None,
        "swa_head_dim": hidden_size // 4, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16,
        "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"],
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "logits_mup_width_multiplier": 2.0,
    }  # fmt: skip
    return transformers.InklingConfig(
        text_config=text, vision_config={"patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3},
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 4}, image_token_id=ids(INKLING_TOKENS[0]),
        audio_token_id=ids(INKLING_TOKENS[1]), image_bos_token_id=ids(INKLING_TOKENS[2]),
        audio_bos_token_id=ids(INKLING_TOKENS[3]),
    )  # fmt: skip


def inkling_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.InklingProcessor(
        feature_extractor=transformers.InklingFeatureExtractor(feature_size=4), tokenizer=tokenizer, num_dmel_bins=4,
        image_processor=transformers.InklingImageProcessor(size={"height": 8, "width": 8}),
        chat_template=chat_template("<|content_image|><|unused_200054|>"),
    )  # fmt: skip


def pp_chart2table_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    parts = OCR["got_ocr2"].config(tokenizer, hidden_size)
    return transformers.PPChart2TableConfig(
        text_config=parts.text_config, vision_config=parts.vision_config, image_seq_length=256,
        image_token_index=parts.image_token_index,
    )  # fmt: skip


def pp_chart2table_processor(tokenizer: Any) -> ProcessorMixin:
    """Let the chat template write all tokens of an image, as the published one does."""
    return transformers.PPChart2TableProcessor(
        image_processor=transformers.PPChart2TableImageProcessor(size={"height": 128, "width": 128}),
        tokenizer=tokenizer, chat_template=chat_template("<img>" + "<imgpad>" * 256 + "</img>"),
    )  # fmt: skip


def shieldgemma2_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    parts = GEMMA["gemma3"].config(tokenizer, hidden_size)
    return transformers.ShieldGemma2Config(
        text_config=parts.text_config, vision_config=parts.vision_config, mm_tokens_per_image=16,
        boi_token_index=parts.boi_token_index, eoi_token_index=parts.eoi_token_index,
        image_token_index=parts.image_token_index,
    )  # fmt: skip


def shieldgemma2_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.ShieldGemma2Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32}), tokenizer=tokenizer,
        image_seq_length=16, chat_template=chat_template("<start_of_image>"),
    )  # fmt: skip


def gemma3n_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use FastVLM's tower, since timm has no small MobileNet V5. Towers have tokens of their own after the text's."""
    size = len(tokenizer)
    text = sliding_sizes(tokenizer, hidden_size, "gemma3n_text", num_layers=4) | {
        "intermediate_size": 2 * hidden_size, "vocab_size_per_layer_input": size, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 2, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    audio = {
        "vocab_size": 4, "vocab_offset": size + 4, "hidden_size": 32, "input_feat_size": 16,
        "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "sscp_conv_channel_size": [8, 8],
        "conf_attention_chunk_size": 4, "conf_attention_context_left": 5,
    }  # fmt: skip
    tower = LLAVA["fast_vlm"].config(tokenizer, hidden_size).vision_config
    vision = {
        "architecture": tower.architecture, "model_args": tower.model_args, "hidden_size": tower.hidden_size,
        "vocab_size": 4, "vocab_offset": size,
    }  # fmt: skip
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in GEMMA3N_NAMES}
    return transformers.Gemma3nConfig(
        text_config=text, audio_config=audio, vision_config=vision, vision_soft_tokens_per_image=16, **ids
    )


def gemma3n_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.Gemma3nProcessor(
        feature_extractor=transformers.Gemma3nAudioFeatureExtractor(), tokenizer=tokenizer, image_seq_length=16,
        image_processor=transformers.SiglipImageProcessor(size={"height": 32, "width": 32}, do_normalize=False),
        chat_template=chat_template("<image_soft_token>"),
    )  # fmt: skip


def deepseek_ocr2_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use 12 x 12 and 16 x 16 queries, whose numbers the model fixes."""
    sam = {
        "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 16,
        "image_size": 256, "patch_size": 4, "window_size": 8, "global_attn_indexes": [],
        "downsample_channels": [16, 32], "initializer_range": 0.02,
    }  # fmt: skip
    encoder = vision_sizes(4, 64, num_layers=1) | {"hidden_size": 32, "num_key_value_heads": 4, "vocab_size": 1}
    text = layer_sizes(tokenizer, hidden_size) | {
        "mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "bos_token_id": None,
    }  # fmt: skip
    sizes = {k: v for k, v in encoder.items() if k not in ("patch_size", "image_size")}
    return transformers.DeepseekOcr2Config(
        text_config=text, vision_config={"sam_config": sam, "encoder_config": sizes},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
    )  # fmt: skip


def deepseek_ocr2_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.DeepseekOcr2Processor(
        image_processor=transformers.DeepseekOcr2ImageProcessor(size={"height": 256, "width": 256}, tile_size=192),
        tokenizer=tokenizer, patch_size=4, downsample_ratio=4, chat_template=chat_template(IMAGE),
    )  # fmt: skip


def emu3_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use a vocabulary of 16 tokens for the patches of images."""
    vq = {
        "codebook_size": 16, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "num_res_blocks": 1,
        "channel_multiplier": [1, 1, 1, 1], "hidden_size": 32, "attn_resolutions": [],
    }  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids
    return transformers.Emu3Config(
        text_config=layer_sizes(tokenizer, hidden_size) | {"bos_token_id": ids("<bos>"), "attention_dropout": 0.0},
        vq_config=vq, vocabulary_map={name: ids(name) for name in (*EMU3_CODES, "<|extra_200|>", IMAGE)},
    )  # fmt: skip


def emu3_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.Emu3Processor(
        image_processor=transformers.Emu3ImageProcessor(min_pixels=16 * 16, max_pixels=32 * 32), tokenizer=tokenizer,
        chat_template=chat_template(IMAGE),
    )  # fmt: skip


def fuyu_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    text = text_sizes(tokenizer, hidden_size, "persimmon") | {"num_key_value_heads": 4}
    return transformers.FuyuConfig(
        text_config=text, hidden_size=hidden_size, patch_size=8,
        image_token_id=tokenizer.convert_tokens_to_ids("|SPEAKER|"),
    )  # fmt: skip


def fuyu_processor(tokenizer: Any) -> ProcessorMixin:
    sizes: dict[str, Any] = {"size": {"height": 32, "width": 32}, "patch_size": {"height": 8, "width": 8}}
    return transformers.FuyuProcessor(image_processor=transformers.FuyuImageProcessor(**sizes), tokenizer=tokenizer)


def blip_config(config_class: str) -> Any:
    """Return the builder of a config with a Q-Former, whose queries become an image's tokens."""

    def config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
        parts = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        former = parts | {
            "vocab_size": len(tokenizer), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            "initializer_range": 0.2,
        }  # fmt: skip
        return getattr(transformers, config_class)(
            text_config=text_sizes(tokenizer, hidden_size, "llama"), qformer_config=former,
            vision_config=parts | {"image_size": 16, "patch_size": 4, "initializer_range": 0.2},
            num_query_tokens=BLIP_QUERIES, image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        )  # fmt: skip

    return config


def random_queries(model: Any) -> None:
    torch.nn.init.normal_(model.query_tokens)


def blip_2_processor(tokenizer: Any) -> ProcessorMixin:
    """Write an image's tokens before the text, without a chat template, as the published one does."""
    return transformers.Blip2Processor(blip_images(), tokenizer, num_query_tokens=BLIP_QUERIES)


def instructblip_processor(tokenizer: Any) -> ProcessorMixin:
    return transformers.InstructBlipProcessor(blip_images(), tokenizer, tokenizer, num_query_tokens=BLIP_QUERIES)


def blip_images() -> Any:
    return transformers.BlipImageProcessor(size=TILE)


BLIP_QUERIES = 4
COMPASS_TOKENS = ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>")


def chameleon_config() -> PreTrainedConfig:
    return transformers.ChameleonConfig(vocabulary_map={IMAGE: 4}, vq_config={"base_channels": 32}, **SMALL)


def diffusion_gemma_config() -> PreTrainedConfig:
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "num_global_key_value_heads": 1}
    text = SMALL | experts | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    return transformers.DiffusionGemmaConfig(text_config=text, vision_config={"num_hidden_layers": 1})


def nemotron_h_omni_config() -> PreTrainedConfig:
    text = {name: size for name, size in SMALL.items() if name != "num_hidden_layers"}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "video_temporal_patch_size": 2}
    return transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config=text | {"layers_block_type": ["attention"], "head_dim": 16}, vision_config=vision,
        vision_hidden_size=32, image_token_id=4,
    )  # fmt: skip


def vision_encoder_decoder_config() -> PreTrainedConfig:
    encoder, decoder = (
        transformers.ViTConfig(num_hidden_layers=1),
        transformers.GPT2Config(n_layer=1, n_head=4, n_embd=64),
    )
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)


SMALL: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "chameleon": chameleon_config, "diffusion_gemma": diffusion_gemma_config, "evolla": transformers.EvollaConfig,
    "nemotron_h_omni": nemotron_h_omni_config, "vision-encoder-decoder": vision_encoder_decoder_config,
}  # fmt: skip
"""Configs of types whose facts cannot be derived. Their default configs make no model, or lack a token of images."""
INKLING_TOKENS = ("<|unused_200054|>", "<|unused_200053|>", "<|content_image|>", "<|content_audio_input|>")
GEMMA3N_NAMES = {
    "boi": "<start_of_image>", "image": "<image_soft_token>", "eoi": "<end_of_image>",
    "boa": "<start_of_audio>", "audio": "<audio_soft_token>", "eoa": "<end_of_audio>",
}  # fmt: skip
EMU3_CODES = tuple(f"<|visual token {i:06d}|>" for i in range(16))
EMU3_NAMES = {
    "image_token": IMAGE, "boi_token": "<|image start|>", "eoi_token": "<|image end|>", "bos_token": "<bos>",
    "image_wrapper_token": "<|image token|>", "eof_token": "<|extra_201|>",
}  # fmt: skip
FUYU_TOKENS = ("|SPEAKER|", "|NEWLINE|", "<s>", *(f"<0x0{i}>" for i in range(5)))

RARE: dict[str, TinyFamily] = {
    "video_llava": TinyFamily((IMAGE, VIDEO), video_llava_config, video_llava_processor),
    "hyperclovax_vision_v2": TinyFamily(QWEN_TOKENS, hyperclovax_config, hyperclovax_processor),
    "cohere_compass": TinyFamily(COMPASS_TOKENS, cohere_compass_config, cohere_compass_processor),
    "glm5_next": TinyFamily(GLM_TOKENS, glm5_next_config, glm5_next_processor),
    "inkling_mm_model": TinyFamily(INKLING_TOKENS, inkling_config, inkling_processor),
    "pp_chart2table": TinyFamily(OCR["got_ocr2"].special_tokens, pp_chart2table_config, pp_chart2table_processor),
    "shieldgemma2": TinyFamily(
        GEMMA["gemma3"].special_tokens, shieldgemma2_config, shieldgemma2_processor, GEMMA["gemma3"].token_names,
        GEMMA["gemma3"].after_init,
    ),
    "gemma3n": TinyFamily(
        (*GEMMA3N_NAMES.values(), "\n", "\n\n", "\n\n\n", "\n\n\n\n"), gemma3n_config, gemma3n_processor,
        {f"{name}_token": token for name, token in GEMMA3N_NAMES.items()}, LLAVA["fast_vlm"].after_init,
    ),
    "deepseek_ocr2": TinyFamily((IMAGE,), deepseek_ocr2_config, deepseek_ocr2_processor),
    "emu3": TinyFamily((*EMU3_NAMES.values(), "<|extra_200|>", *EMU3_CODES), emu3_config, emu3_processor, EMU3_NAMES),
    "fuyu": TinyFamily(FUYU_TOKENS, fuyu_config, fuyu_processor),
    "blip-2": TinyFamily((IMAGE,), blip_config("Blip2Config"), blip_2_processor, after_init=random_queries),
    "instructblip": TinyFamily(
        (IMAGE,), blip_config("InstructBlipConfig"), instructblip_processor, after_init=random_queries
    ),
}  # fmt: skip
