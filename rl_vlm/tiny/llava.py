"""LLaVA 1.5, NeXT and OneVision, Pixtral in LLaVA's form, and Mistral 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import Resolution, TinyFamily, chat_template, text_sizes, vision_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

IMAGE_TOKEN = "<image>"
PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_RESOLUTION = Resolution(16, 4)
TILE = {"height": 16, "width": 16}
GRIDS = [[16, 32], [32, 16], [32, 32]]
"""Heights and widths to which an image may be enlarged; it is cut into tiles."""


def _llava_config(tokenizer: Any, hidden_size: int, resolution: Resolution = _RESOLUTION) -> PreTrainedConfig:
    from transformers import LlavaConfig

    vision = vision_sizes(resolution.patch_size(), resolution.side) | {"model_type": "clip_vision_model"}
    return LlavaConfig(
        text_config=text_sizes(tokenizer, hidden_size, "llama"),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=resolution.num_tokens,
    )


def _llava_processor(tokenizer: Any, resolution: Resolution = _RESOLUTION) -> ProcessorMixin:
    from transformers import CLIPImageProcessor, LlavaProcessor

    return LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": resolution.side}, crop_size=resolution.size),
        tokenizer=tokenizer,
        patch_size=resolution.patch_size(),
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which "default" then leaves out
        chat_template=chat_template(IMAGE_TOKEN),
    )


def _llava_next_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import LlavaNextConfig

    return LlavaNextConfig(
        text_config=text_sizes(tokenizer, hidden_size, "mistral"),
        vision_config=vision_sizes(patch_size=8, image_size=16) | {"model_type": "clip_vision_model"},
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=4,
        image_grid_pinpoints=GRIDS,
    )


def _llava_next_processor(tokenizer: Any) -> ProcessorMixin:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    return LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(size={"shortest_edge": 16}, crop_size=TILE, image_grid_pinpoints=GRIDS),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template(IMAGE_TOKEN),
    )


def _llava_onevision_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import LlavaOnevisionConfig

    siglip = {"model_type": "siglip_vision_model", "vision_use_head": False}
    return LlavaOnevisionConfig(
        text_config=text_sizes(tokenizer, hidden_size, "qwen2"),
        vision_config=vision_sizes(patch_size=8, image_size=16, num_layers=1) | siglip,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=GRIDS,
    )


def _llava_onevision_processor(tokenizer: Any) -> ProcessorMixin:
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionProcessor, LlavaOnevisionVideoProcessor

    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=TILE, image_grid_pinpoints=GRIDS),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=TILE),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=chat_template(IMAGE_TOKEN),
    )


def _llava_pixtral_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import LlavaConfig

    return LlavaConfig(
        text_config=text_sizes(tokenizer, hidden_size, "mistral"),
        vision_config=vision_sizes(patch_size=8, image_size=32, num_layers=1) | {"model_type": "pixtral"},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        image_seq_length=1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def _mistral3_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import Mistral3Config

    return Mistral3Config(
        text_config=text_sizes(tokenizer, hidden_size, "mistral") | {"sliding_window": None},
        vision_config=vision_sizes(patch_size=4, image_size=32, num_layers=1) | {"model_type": "pixtral"},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )


def _pixtral_processor(tokenizer: Any, patch_size: int, merge_size: int) -> ProcessorMixin:
    from transformers import PixtralImageProcessor, PixtralProcessor

    return PixtralProcessor(
        image_processor=PixtralImageProcessor(size={"longest_edge": 32}, patch_size=patch_size),
        tokenizer=tokenizer,
        patch_size=patch_size,
        spatial_merge_size=merge_size,
        chat_template=chat_template("[IMG]"),
    )


LLAVA: dict[str, TinyFamily] = {
    "llava": TinyFamily((IMAGE_TOKEN,), _llava_config, _llava_processor, is_resizable=True),
    "llava_next": TinyFamily((IMAGE_TOKEN,), _llava_next_config, _llava_next_processor),
    "llava_onevision": TinyFamily((IMAGE_TOKEN, "<video>"), _llava_onevision_config, _llava_onevision_processor),
    "llava_pixtral": TinyFamily(
        PIXTRAL_TOKENS, _llava_pixtral_config, lambda tokenizer: _pixtral_processor(tokenizer, 8, merge_size=1)
    ),
    "mistral3": TinyFamily(
        PIXTRAL_TOKENS, _mistral3_config, lambda tokenizer: _pixtral_processor(tokenizer, 4, merge_size=2)
    ),
}
