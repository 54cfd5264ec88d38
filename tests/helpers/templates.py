"""Chat templates of published models, which TRL ships, with the processors of tiny models."""

import re
from pathlib import Path
from typing import Any

import trl
from transformers import AutoProcessor

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.observations import ObservationRenderer
from rl_vlm.data.prompts import PromptBuilder
from tests.tiny.build import build_tiny

TEMPLATES = Path(trl.__file__).parent / "chat_templates"

END = "<|im_end|>"
LFM = ("lfm2_2_5_vl", "lfm2_2_5", "lfm2_2_5_v2")
"""The last two are published with models without images, whose tokens they write all the same."""
CHAT_ML = ("qwen2_5_vl", "qwen3_vl", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", *LFM)
GEMMA_4 = ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma")
"""The last one is published with a model of diffusion, and writes the turns of Gemma 4."""
FAMILY = {
    "qwen2_5_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl", "gemma3": "gemma3", "muse_glimmer": "muse_glimmer",
    "smolvlm": "smolvlm", "idefics3": "idefics3", "llava_next": "llava_next",
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"), "qwen3_5"),
    **dict.fromkeys(GEMMA_4, "gemma4"), **dict.fromkeys(LFM, "lfm2_vl"),
}  # fmt: skip
"""The tiny model whose processor renders a template, for each template that writes images."""
STOPS = {
    **{name: [END] for name in CHAT_ML}, **{name: ["<turn|>", "<|tool_response>"] for name in GEMMA_4},
    "gemma3": ["<end_of_turn>"], "smolvlm": ["<end_of_utterance>"], "idefics3": ["<end_of_utterance>"],
    "llava_next": ["</s>"], "muse_glimmer": ["<|eot|>"],
}  # fmt: skip
"""Tokens that end a turn, as the published generation configs have them."""
TOOL_IMAGES = {"qwen3_vl", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", *LFM, "muse_glimmer"} | {
    "gemma4_v2", "gemma4_v4", "gemma4_v5", "diffusion_gemma",
}  # fmt: skip
"""Templates that write images in tool messages."""
BEGINS = {**dict.fromkeys(("smolvlm", "idefics3", "llava_next"), " "), "muse_glimmer": " to=user<|message|>"}
"""Texts that templates write before a turn, and not in their generation prompt."""


def builder_of(template: str, directory: Path) -> PromptBuilder:
    """A prompt builder with a published template, whose special tokens its tokenizer has."""
    processor = AutoProcessor.from_pretrained(build_tiny(FAMILY[template], directory))
    processor.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    found = re.findall(r"<\|[a-z_\"]+\|?>|<[a-z_]+\|>|</?s>|<[a-z_]+_of_[a-z_]+>", processor.chat_template)
    new = sorted(set(found) - processor.tokenizer.get_vocab().keys())
    processor.tokenizer.add_special_tokens({"additional_special_tokens": new}, replace_extra_special_tokens=False)
    return PromptBuilder(processor, DataConfig())


def renderer_of(template: str, builder: PromptBuilder) -> ObservationRenderer:
    return ObservationRenderer(builder, builder.processor.tokenizer.convert_tokens_to_ids(STOPS[template]))


def message(role: str, *content: str) -> dict[str, Any]:
    """A message whose `image` is an image block."""
    return {
        "role": role,
        "content": [{"type": "image"} if c == "image" else {"type": "text", "text": c} for c in content],
    }


def turn(builder: PromptBuilder, text: str, stop: str) -> list[int]:
    """The tokens of a turn, its stop token included."""
    return [*builder.part(text, ())[0].tolist(), builder.processor.tokenizer.convert_tokens_to_ids(stop)]
