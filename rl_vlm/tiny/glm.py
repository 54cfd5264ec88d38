"""GLM-4.1V and GLM-4.6V."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, layer_sizes, mrope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

SPECIAL_TOKENS = (
    "<|begin_of_image|>", "<|end_of_image|>", "<|image|>",
    "<|begin_of_video|>", "<|end_of_video|>", "<|video|>",
)  # fmt: skip


def _glm_config(config_class: str) -> Callable[[Any, int], PreTrainedConfig]:
    def build(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
        import transformers

        ids = dict(zip(SPECIAL_TOKENS, tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)), strict=True))
        vision = {
            "depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "image_size": 32,
            "out_hidden_size": hidden_size, "intermediate_size": 128,
        }  # fmt: skip
        return getattr(transformers, config_class)(
            text_config=_text_sizes(tokenizer, hidden_size),
            vision_config=vision,
            image_start_token_id=ids["<|begin_of_image|>"],
            image_end_token_id=ids["<|end_of_image|>"],
            image_token_id=ids["<|image|>"],
            video_start_token_id=ids["<|begin_of_video|>"],
            video_end_token_id=ids["<|end_of_video|>"],
            video_token_id=ids["<|video|>"],
        )

    return build


def _text_sizes(tokenizer: Any, hidden_size: int) -> dict[str, Any]:
    return layer_sizes(tokenizer, hidden_size) | {
        "intermediate_size": 2 * hidden_size,
        "rope_parameters": mrope(hidden_size // 16, partial_rotary_factor=0.5),  # half of a head's dimensions rotate
    }


def _glm_processor(version: str) -> Callable[[Any], ProcessorMixin]:
    def build(tokenizer: Any) -> ProcessorMixin:
        import transformers

        patches = {"patch_size": 4, "merge_size": 2}
        pixels = {"shortest_edge": 2 * 8 * 8, "longest_edge": 2 * 40 * 40}  # counted over two frames, also for an image
        return getattr(transformers, f"{version}Processor")(
            image_processor=getattr(transformers, f"{version}ImageProcessor")(size=pixels, **patches),
            tokenizer=tokenizer,
            video_processor=getattr(transformers, f"{version}VideoProcessor")(size=pixels, **patches),
            chat_template=chat_template("<|begin_of_image|><|image|><|end_of_image|>"),
        )

    return build


GLM: dict[str, TinyFamily] = {
    "glm4v": TinyFamily(SPECIAL_TOKENS, _glm_config("Glm4vConfig"), _glm_processor("Glm4v")),
    "glm46v": TinyFamily(SPECIAL_TOKENS, _glm_config("Glm46VConfig"), _glm_processor("Glm46V")),
}
