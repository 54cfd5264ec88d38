"""GLM-4.1V, GLM-4.5V (experts), GLM-4.6V and GLM-OCR."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, layer_sizes, mrope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

SPECIAL_TOKENS = (
    "<|begin_of_image|>", "<|end_of_image|>", "<|image|>",
    "<|begin_of_video|>", "<|end_of_video|>", "<|video|>",
)  # fmt: skip


def _glm_config(config_class: str, **text: Any) -> Callable[[Any, int], PreTrainedConfig]:
    def build(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
        ids = dict(zip(SPECIAL_TOKENS, tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)), strict=True))
        vision = {
            "depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "image_size": 32,
            "out_hidden_size": hidden_size, "intermediate_size": 128,
        }  # fmt: skip
        return hf_class(config_class)(
            text_config=_text_sizes(tokenizer, hidden_size) | text,
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
    """Return sizes with heads of 32, the smallest that vLLM runs on CPUs. Half of a head rotates.

    vLLM takes the inner size for the merger of GLM-OCR too, which transformers makes three times as wide as its output.
    """
    return layer_sizes(tokenizer, hidden_size) | {
        "num_attention_heads": max(1, hidden_size // 32), "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 3 * hidden_size, "rope_parameters": mrope(8, partial_rotary_factor=0.5),
    }  # fmt: skip


def _glm_processor(version: str) -> Callable[[Any], ProcessorMixin]:
    def build(tokenizer: Any) -> ProcessorMixin:
        patches = {"patch_size": 4, "merge_size": 2}
        pixels = {"shortest_edge": 2 * 8 * 8, "longest_edge": 2 * 40 * 40}  # counted over two frames, also for an image
        video_pixels = pixels | {"longest_edge": 64 * 40 * 40}
        return hf_class(f"{version}Processor")(
            image_processor=hf_class(f"{version}ImageProcessor")(size=pixels, **patches),
            tokenizer=tokenizer,
            video_processor=hf_class(f"{version}VideoProcessor")(size=video_pixels, **patches),
            chat_template=chat_template(
                "<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_video|><|video|><|end_of_video|>"
            ),
        )

    return build


_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 64, "use_qk_norm": False,
}  # fmt: skip

GLM: dict[str, TinyFamily] = {
    "glm4v": TinyFamily(SPECIAL_TOKENS, _glm_config("Glm4vConfig", attention_bias=True), _glm_processor("Glm4v")),
    "glm4v_moe": TinyFamily(SPECIAL_TOKENS, _glm_config("Glm4vMoeConfig", **_EXPERTS), _glm_processor("Glm4v")),
    "glm_ocr": TinyFamily(SPECIAL_TOKENS, _glm_config("GlmOcrConfig"), _glm_processor("Glm46V")),
    "glm46v": TinyFamily(SPECIAL_TOKENS, _glm_config("Glm46VConfig", attention_bias=True), _glm_processor("Glm46V")),
}
