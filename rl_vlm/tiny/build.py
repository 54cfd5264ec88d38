"""Tiny vision-language models of real families, built from their own config and processor classes without a download.

`build_tiny("qwen2_5_vl", directory)` writes a checkpoint of about half a million random parameters, with a tokenizer
trained on the spot, that loads through `AutoProcessor` and `AutoModelForImageTextToText` like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from rl_vlm.tiny.cohere import COHERE
from rl_vlm.tiny.deepseek import DEEPSEEK
from rl_vlm.tiny.family import TinyFamily
from rl_vlm.tiny.gemma import GEMMA
from rl_vlm.tiny.glm import GLM
from rl_vlm.tiny.hybrid import HYBRID
from rl_vlm.tiny.llava import LLAVA
from rl_vlm.tiny.mllama import MLLAMA
from rl_vlm.tiny.ocr import OCR
from rl_vlm.tiny.qwen import QWEN
from rl_vlm.tiny.tiles import TILES
from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer

TINY_FAMILIES: dict[str, TinyFamily] = {
    **QWEN, **GLM, **LLAVA, **TILES, **GEMMA, **COHERE, **DEEPSEEK, **OCR, **MLLAMA, **HYBRID
}  # fmt: skip


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

    parts = TINY_FAMILIES[family]
    tokenizer = train_tokenizer(corpus, parts.special_tokens, model_specific_special_tokens=parts.token_names)
    tokenizer.add_tokens(list(whole_tokens))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = parts.config(tokenizer, hidden_size)
        for part in (config, config.text_config, config.vision_config):
            part.initializer_range = initializer_range
        model = AutoModelForImageTextToText.from_config(config)
        if parts.after_init:
            parts.after_init(model)
    model.save_pretrained(directory)
    parts.processor(tokenizer).save_pretrained(directory)
    return Path(directory)
