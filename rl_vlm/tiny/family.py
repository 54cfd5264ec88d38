"""What it takes to build one family small, and a chat template that most families can share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin


@dataclass(frozen=True)
class TinyFamily:
    """One family: its special tokens, its config from a tokenizer and the language model's width, its processor."""

    special_tokens: tuple[str, ...]
    config: Callable[[Any, int], PreTrainedConfig]
    processor: Callable[[Any], ProcessorMixin]
    token_names: dict[str, str] = field(default_factory=dict)
    """Names under which the tokenizer itself knows special tokens, such as `{"image_token": "<image>"}`."""
    after_init: Callable[[PreTrainedModel], None] | None = None
    """Gives random values to weights that are zero at initialisation and would hide the image."""


def chat_template(image: str) -> str:
    """A chat template in the style of ChatML, with the text `image` where an image block is."""
    return CHAT_TEMPLATE.replace("IMAGE", image)


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
