"""Tiny vision-language models of real families, built from their own config and processor classes without a download.

`build_tiny("qwen2_5_vl", directory)` writes a checkpoint of about half a million random parameters, with a tokenizer
trained on the spot, that loads through `AutoProcessor` and `AutoModelForImageTextToText` like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for block in message.content -%}
{%- if block.type == "image" -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif block.type == "text" -%}{{ block.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

DEFAULT_CORPUS = (
    "system user assistant What is in this picture? Which digit is this? Describe the image. Compare the two images.",
    "The answer is <answer>7</answer> <answer>12</answer> because it has one loop and a long tail, yes or no.",
)


@dataclass(frozen=True)
class TinyFamily:
    """How to build one family: its config from a tokenizer and sizes, and its processor from a tokenizer."""

    config: Callable[[Any, int], PreTrainedConfig]
    processor: Callable[[Any], ProcessorMixin]


def build_tiny(
    family: str,
    directory: str | Path,
    *,
    corpus: Iterable[str] = DEFAULT_CORPUS,
    whole_tokens: Sequence[str] = (),
    hidden_size: int = 96,
    initializer_range: float = 0.02,
    seed: int = 0,
) -> Path:
    """Write a random tiny checkpoint of `family` (a key of `TINY_FAMILIES`) to `directory` and return its path.

    `corpus` trains the tokenizer's merges, and each of `whole_tokens` becomes one token, as tags are in many
    tokenizers. `hidden_size` is the width of the language model, a multiple of 16. `initializer_range` is the standard
    deviation of initial weights: at the usual 0.02 so narrow a model attends almost evenly, and at 0.1 it learns much
    sooner. `seed` fixes the weights without touching the global random state.
    """
    from transformers import AutoModelForImageTextToText

    tokenizer = train_tokenizer(corpus)
    tokenizer.add_tokens(list(whole_tokens))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = TINY_FAMILIES[family].config(tokenizer, hidden_size)
        for part in (config, config.text_config, config.vision_config):
            part.initializer_range = initializer_range
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(directory)
    TINY_FAMILIES[family].processor(tokenizer).save_pretrained(directory)
    return Path(directory)


def train_tokenizer(corpus: Iterable[str], vocab_size: int = 400) -> Any:
    """A byte-level BPE tokenizer in Qwen's format, its merges trained on `corpus`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    return Qwen2Tokenizer(
        vocab=bpe.get_vocab(), merges=bpe_merges(bpe), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
    )  # fmt: skip


def bpe_merges(tokenizer: Any) -> Any:
    """The merges of a BPE tokenizer, pairs of tokens in the order in which they were learned."""
    import json

    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def _token_ids(tokenizer: Any) -> dict[str, Any]:
    ids = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }


def _text_sizes(tokenizer: Any, hidden_size: int) -> dict[str, Any]:
    half_head_dim = hidden_size // 4 // 2
    height_width = 3 * half_head_dim // 8
    sections = [half_head_dim - 2 * height_width, height_width, height_width]
    return {
        "vocab_size": len(tokenizer), "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


def _qwen2_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import Qwen2VLConfig

    vision = {"depth": 2, "embed_dim": 64, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2, "hidden_size": hidden_size}
    return Qwen2VLConfig(text_config=_text_sizes(tokenizer, hidden_size), vision_config=vision, **_token_ids(tokenizer))


def _qwen2_5_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import Qwen2_5_VLConfig

    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4, "window_size": 32,
        "out_hidden_size": hidden_size, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=_text_sizes(tokenizer, hidden_size), vision_config=vision, **_token_ids(tokenizer)
    )


def _qwen3_vision(hidden_size: int) -> dict[str, Any]:
    return {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4,
        "out_hidden_size": hidden_size, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip


def _qwen3_vl_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import Qwen3VLConfig

    text = _text_sizes(tokenizer, hidden_size) | {"head_dim": hidden_size // 4}
    return Qwen3VLConfig(text_config=text, vision_config=_qwen3_vision(hidden_size), **_token_ids(tokenizer))


def _qwen3_vl_moe_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    from transformers import Qwen3VLMoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    text = _text_sizes(tokenizer, hidden_size) | {"head_dim": hidden_size // 4} | experts
    return Qwen3VLMoeConfig(text_config=text, vision_config=_qwen3_vision(hidden_size), **_token_ids(tokenizer))


def _qwen_processor(processor_class: str, video_class: str) -> Callable[[Any], ProcessorMixin]:
    def build(tokenizer: Any) -> ProcessorMixin:
        import transformers

        sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "min_pixels": 8 * 8, "max_pixels": 64 * 64}
        return getattr(transformers, processor_class)(
            image_processor=transformers.Qwen2VLImageProcessor(**sizes),
            tokenizer=tokenizer,
            video_processor=getattr(transformers, video_class)(patch_size=4, merge_size=2),
            chat_template=CHAT_TEMPLATE,
        )

    return build


TINY_FAMILIES: dict[str, TinyFamily] = {
    "qwen2_vl": TinyFamily(_qwen2_vl_config, _qwen_processor("Qwen2VLProcessor", "Qwen2VLVideoProcessor")),
    "qwen2_5_vl": TinyFamily(_qwen2_5_vl_config, _qwen_processor("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")),
    "qwen3_vl": TinyFamily(_qwen3_vl_config, _qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor")),
    "qwen3_vl_moe": TinyFamily(_qwen3_vl_moe_config, _qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor")),
}
