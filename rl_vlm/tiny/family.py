"""The parts of a tiny model family, and sizes and a chat template that most families can share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin


@dataclass(frozen=True)
class Resolution:
    """How a tiny model sees an image: resized to a square, as a square of tokens.

    Example: with `Resolution(32, 2)` an image of any size is resized to 32 x 32 pixels, and becomes 2 x 2 tokens.
    Families that keep the ratio of the sides have about as many pixels and tokens.
    """

    side: int
    tokens_per_side: int

    @property
    def num_tokens(self) -> int:
        """Tokens of an image."""
        return self.tokens_per_side**2

    @property
    def size(self) -> dict[str, int]:
        """The size of an image, as image processors read it."""
        return {"height": self.side, "width": self.side}

    def patch_size(self, merged: int = 1) -> int:
        """Return the side of a patch in pixels, if squares of `merged` x `merged` patches become one token."""
        return self.side // (self.tokens_per_side * merged)


@dataclass(frozen=True)
class TinyFamily:
    """One family: its special tokens, and functions that build its config (from tokenizer and width) and processor."""

    special_tokens: tuple[str, ...]
    config: Callable[..., PreTrainedConfig]
    processor: Callable[..., ProcessorMixin]
    token_names: dict[str, str] = field(default_factory=dict)
    """The tokenizer's own names of special tokens, such as `{"image_token": "<image>"}`."""
    after_init: Callable[[PreTrainedModel], None] | None = None
    """Sets weights to random values if they are zero at initialisation, which would hide the image."""
    is_resizable: bool = False
    """Whether config and processor take `resolution`, too."""


def hf_class(name: str) -> Any:
    """Return a class of transformers, which is imported by the first call."""
    import transformers

    return getattr(transformers, name)


def layer_sizes(tokenizer: Any, hidden_size: int) -> dict[str, Any]:
    """Return the sizes of a causal language model of two layers with grouped-query attention."""
    return {
        "vocab_size": len(tokenizer), "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


def text_sizes(tokenizer: Any, hidden_size: int, model_type: str) -> dict[str, Any]:
    """Return `layer_sizes` for a language model that is named by its type, such as Llama, Mistral or Qwen2."""
    named = {"model_type": model_type, "head_dim": hidden_size // 4, "bos_token_id": None}
    return layer_sizes(tokenizer, hidden_size) | named


def mrope(num_frequencies: int, **more: Any) -> dict[str, Any]:
    """Return M-RoPE parameters: three eighths of the frequencies each for height and width, the rest for time."""
    height_width = 3 * num_frequencies // 8
    sections = [num_frequencies - 2 * height_width, height_width, height_width]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}


def vision_sizes(patch_size: int, image_size: int, num_layers: int = 2) -> dict[str, Any]:
    """Return the sizes of a vision transformer. If features skip the last layer (LLaVA), that layer is idle."""
    return {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": num_layers, "num_attention_heads": 4,
        "patch_size": patch_size, "image_size": image_size,
    }  # fmt: skip


def chat_template(image: str, video: str | None = None) -> str:
    """Return a chat template in the style of ChatML. It renders blocks of images and videos as these texts.

    Without a text for them, it leaves videos out.
    """
    of_videos = "" if video is None else VIDEO_BLOCK.replace("VIDEO", video)
    return CHAT_TEMPLATE.replace("IMAGE\n", f"{image}\n{of_videos}")


VIDEO_BLOCK = """\
{%- elif block.type == "video" -%}VIDEO
"""


CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for block in message.content -%}
{%- if block.type == "image" -%}IMAGE
{%- elif block.type == "text" -%}{{ block.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
