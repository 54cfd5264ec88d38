"""Families that cut an image into square tiles: Ovis2, Idefics3, SmolVLM and Step 3.7."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, text_sizes, vision_sizes
from rl_vlm.tiny.gemma import sliding_sizes
from rl_vlm.tiny.internvl import ONE_TILE
from tests.tiny.llava import TILE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

OVIS2_INDICATORS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
"""Tokens around and between an image's tiles whose embeddings come from the vision tower's own table."""
OVIS2_TOKENS = ("<image>", "<IMG_ATOM>", *OVIS2_INDICATORS)
IDEFICS3_TOKENS = (
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)  # fmt: skip
TOKENS_PER_TILE = ONE_TILE.num_tokens


def _ovis2_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    indicators = {"num_visual_indicator_tokens": len(OVIS2_INDICATORS), "hidden_stride": 2, "vocab_size": 64}
    return hf_class("Ovis2Config")(
        text_config=text_sizes(tokenizer, hidden_size, "qwen2"),
        vision_config=vision_sizes(patch_size=4, image_size=16, num_layers=1) | indicators,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids(list(OVIS2_INDICATORS)),
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
    )


def _ovis2_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("Ovis2Processor")(
        image_processor=hf_class("Ovis2ImageProcessor")(size=TILE, crop_to_patches=True, max_patches=4),
        tokenizer=tokenizer,
        image_seq_length=TOKENS_PER_TILE,
        chat_template=chat_template("<image>"),
    )


def _idefics3_config(config_class: str, tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    return hf_class(config_class)(
        text_config=text_sizes(tokenizer, hidden_size, "llama"),
        vision_config=vision_sizes(patch_size=4, image_size=16, num_layers=1),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )


def _idefics3_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("Idefics3Processor")(
        image_processor=hf_class("Idefics3ImageProcessor")(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
        ),
        tokenizer=tokenizer,
        image_seq_len=TOKENS_PER_TILE,
        chat_template=chat_template("<image>"),
    )


def _smolvlm_processor(tokenizer: Any) -> ProcessorMixin:
    tiles: dict[str, Any] = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    return hf_class("SmolVLMProcessor")(
        image_processor=hf_class("SmolVLMImageProcessor")(**tiles),
        tokenizer=tokenizer,
        video_processor=hf_class("SmolVLMVideoProcessor")(**tiles),
        image_seq_len=TOKENS_PER_TILE,
        chat_template=chat_template("<image>", "<video>"),
    )


STEP_TOKENS = ("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>")


def _step3p7_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use a dense layer and one with experts. A layer with a sliding window has other heads than one without."""
    text = sliding_sizes(tokenizer, hidden_size, "step3p5") | {
        "num_sliding_attention_heads": 2, "mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "share_expert_dim": 64,
    }  # fmt: skip
    vision = vision_sizes(patch_size=2, image_size=32, num_layers=1) | {"hidden_size": 32, "mlp_ratio": 2.0}
    return hf_class("Step3p7Config")(text_config=text, vision_config=vision, image_token_id=tokenizer.image_token_id)


def _step3p7_processor(tokenizer: Any) -> ProcessorMixin:
    """Cut an image into tiles of 16 pixels, besides the whole image in 32. Squares of 8 pixels become tokens."""
    sizes: dict[str, Any] = {"size": {"height": 32, "width": 32}, "patch_size": 16, "vision_patch_size": 2}
    return hf_class("Step3p7Processor")(
        image_processor=hf_class("Step3p7ImageProcessor")(**sizes),
        tokenizer=tokenizer,
        chat_template=chat_template("<im_patch>"),
    )


TILES: dict[str, TinyFamily] = {
    "ovis2": TinyFamily(OVIS2_TOKENS, _ovis2_config, _ovis2_processor),
    "idefics3": TinyFamily(IDEFICS3_TOKENS, partial(_idefics3_config, "Idefics3Config"), _idefics3_processor),
    "step3p7": TinyFamily(STEP_TOKENS, _step3p7_config, _step3p7_processor, {"image_token": "<im_patch>"}),
    "smolvlm": TinyFamily(IDEFICS3_TOKENS, partial(_idefics3_config, "SmolVLMConfig"), _smolvlm_processor),
}
