"""Gemma 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import Resolution, TinyFamily, chat_template, hf_class, text_sizes, vision_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

SLIDING_WINDOW = 8
"""Shorter than an image, so that the sliding layers' mask shows."""

_RESOLUTION = Resolution(32, 4)
SIGLIP = vision_sizes(patch_size=4, image_size=16, num_layers=1) | {"vision_use_head": False}
"""SigLIP without the pooling head, which no family uses."""
_TOKENS = {
    "boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>",
}  # fmt: skip


def sliding_sizes(tokenizer: Any, hidden_size: int, model_type: str, num_layers: int = 2) -> dict[str, Any]:
    """Return sizes of layers with a sliding window and with full attention, in turn."""
    return text_sizes(tokenizer, hidden_size, model_type) | {
        "num_hidden_layers": num_layers,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "sliding_window": SLIDING_WINDOW,
    }


def _config(tokenizer: Any, hidden_size: int, resolution: Resolution = _RESOLUTION) -> PreTrainedConfig:
    vision = {"image_size": resolution.side, "patch_size": resolution.patch_size(merged=2)}
    return hf_class("Gemma3Config")(
        text_config=sliding_sizes(tokenizer, hidden_size, "gemma3_text") | {"query_pre_attn_scalar": hidden_size // 4},
        vision_config=SIGLIP | vision,
        mm_tokens_per_image=resolution.num_tokens,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )


def _processor(tokenizer: Any, resolution: Resolution = _RESOLUTION) -> ProcessorMixin:
    return hf_class("Gemma3Processor")(
        image_processor=hf_class("Gemma3ImageProcessor")(size=resolution.size),
        tokenizer=tokenizer,
        image_seq_length=resolution.num_tokens,
        chat_template=chat_template("<start_of_image>"),
    )


def _random_projector(model: PreTrainedModel) -> None:
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=model.config.initializer_range)


GEMMA: dict[str, TinyFamily] = {
    "gemma3": TinyFamily(
        tuple(_TOKENS.values()), _config, _processor, _TOKENS, _random_projector,
        is_resizable=True,
    ),
}  # fmt: skip
