"""LLaVA 1.5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import Resolution, TinyFamily, chat_template, hf_class, text_sizes, vision_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

IMAGE_TOKEN = "<image>"
_RESOLUTION = Resolution(16, 4)


def _llava_config(tokenizer: Any, hidden_size: int, resolution: Resolution = _RESOLUTION) -> PreTrainedConfig:
    vision = vision_sizes(resolution.patch_size(), resolution.side) | {"model_type": "clip_vision_model"}
    return hf_class("LlavaConfig")(
        text_config=text_sizes(tokenizer, hidden_size, "llama"),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=resolution.num_tokens,
    )


def _llava_processor(tokenizer: Any, resolution: Resolution = _RESOLUTION) -> ProcessorMixin:
    return hf_class("LlavaProcessor")(
        image_processor=hf_class("CLIPImageProcessor")(
            size={"shortest_edge": resolution.side}, crop_size=resolution.size
        ),
        tokenizer=tokenizer,
        patch_size=resolution.patch_size(),
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which "default" then leaves out
        chat_template=chat_template(IMAGE_TOKEN),
    )


LLAVA: dict[str, TinyFamily] = {
    "llava": TinyFamily((IMAGE_TOKEN,), _llava_config, _llava_processor, is_resizable=True),
}
