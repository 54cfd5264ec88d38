"""Mllama (Llama 3.2 Vision): the text attends to the image by cross-attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, text_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

_IMAGE_TOKEN = "<|image|>"


def _mllama_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Build the config as published: the image token has no logit, so its id is one past the vocabulary."""
    tokenizer.add_tokens([_IMAGE_TOKEN], special_tokens=True)
    text = text_sizes(tokenizer, hidden_size, "mllama_text_model") | {
        "vocab_size": len(tokenizer) - 1,
        "num_hidden_layers": 3,
        "cross_attention_layers": [1],
        "bos_token_id": tokenizer.bos_token_id,
    }
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 2, "intermediate_layers_indices": [0], "vision_output_dim": 64, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    return hf_class("MllamaConfig")(
        text_config=text, vision_config=vision, image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE_TOKEN)
    )


def _mllama_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("MllamaProcessor")(
        image_processor=hf_class("MllamaImageProcessor")(size={"height": 16, "width": 16}),
        tokenizer=tokenizer,
        chat_template="<|begin_of_text|>" + chat_template(_IMAGE_TOKEN),
    )


def _open_gates(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if "gate" in name.rsplit(".", 1)[-1]:
            parameter.data.uniform_(1.0, 2.0)


MLLAMA: dict[str, TinyFamily] = {
    "mllama": TinyFamily(
        ("<|begin_of_text|>", "<|python_tag|>"),
        _mllama_config,
        _mllama_processor,
        {"bos_token": "<|begin_of_text|>"},
        _open_gates,
    )
}
