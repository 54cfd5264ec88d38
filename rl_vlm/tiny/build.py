"""Tiny vision-language models, built from their families' own config and processor classes without a download.

`build_tiny("qwen2_5_vl", directory)` writes a checkpoint of about half a million random parameters, with a newly
trained tokenizer, that loads through `AutoProcessor` and `AutoModelForImageTextToText` like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from rl_vlm.tiny.family import TinyFamily
from rl_vlm.tiny.qwen import QWEN
from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer


def build_tiny(
    family: str,
    directory: str | Path,
    *,
    families: Mapping[str, TinyFamily] = QWEN,
    corpus: Iterable[str] = DEFAULT_CORPUS,
    whole_tokens: Sequence[str] = (),
    hidden_size: int = 96,
    initializer_range: float = 0.02,
    seed: int = 0,
) -> Path:
    """Write a random tiny checkpoint of `family` (a key of `families`) to `directory` and return its path.

    `corpus` trains the tokenizer's merges. Each of `whole_tokens` becomes one token, as tags are in many tokenizers.
    `hidden_size` is the width of the language model, a multiple of 16. `initializer_range` is the standard deviation of
    initial weights: with the usual 0.02 such a narrow model attends almost evenly, with 0.1 it learns much sooner.
    `seed` fixes the weights without changing the global random state.
    """
    from transformers import AutoModelForImageTextToText

    parts = families[family]
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
