"""Tiny vision-language models, built from their families' own config and processor classes without a download.

`build_tiny("qwen2_5_vl", directory)` writes a checkpoint of about half a million random parameters, with a newly
trained tokenizer, that loads through `AutoProcessor` and `AutoModelForImageTextToText` like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rl_vlm.errors import ConfigError
from rl_vlm.tiny.families import TINY_FAMILIES
from rl_vlm.tiny.family import Resolution, TinyFamily
from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer


def build_tiny(
    family: str,
    directory: str | Path,
    *,
    families: Mapping[str, TinyFamily] = TINY_FAMILIES,
    corpus: Iterable[str] = DEFAULT_CORPUS,
    whole_tokens: Sequence[str] = (),
    hidden_size: int = 96,
    initializer_range: float = 0.02,
    resolution: Resolution | None = None,
    pixels: tuple[float, float] | None = None,
    seed: int = 0,
) -> Path:
    """Write a random tiny checkpoint of `family` (a key of `families`) to `directory` and return its path.

    `corpus` trains the tokenizer's merges. Each of `whole_tokens` becomes one token, as tags are in many tokenizers.
    `hidden_size` is the width of the language model, a multiple of 16. `initializer_range` is the standard deviation of
    initial weights: with the usual 0.02 such a narrow model attends almost evenly, with 0.1 it learns much sooner.
    `resolution` says how the model sees an image; default: the family's own. `pixels` are the mean and the standard
    deviation that the processor normalizes pixels with, for all channels. `seed` fixes the weights without changing the
    global random state. Raises ConfigError if the family has one resolution only.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    parts = families[family]
    if resolution and not parts.is_resizable:
        able = [name for name, other in families.items() if other.is_resizable]
        raise ConfigError(f"the tiny {family} has one resolution only; these have any: {', '.join(able)}")
    seen = {"resolution": resolution} if resolution else {}
    tokenizer = train_tokenizer(corpus, parts.special_tokens, model_specific_special_tokens=parts.token_names)
    tokenizer.add_tokens(list(whole_tokens))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = parts.config(tokenizer, hidden_size, **seen)
        for part in (config, config.get_text_config(), getattr(config, "vision_config", config)):
            part.initializer_range = initializer_range
        model = AutoModelForImageTextToText.from_config(config)
        if parts.after_init:
            parts.after_init(model)
    model.save_pretrained(directory)
    processor = parts.processor(tokenizer, **seen)
    if pixels:
        mean, spread = pixels
        for kind in (processor.image_processor, getattr(processor, "video_processor", None)):
            if kind is not None:
                kind.image_mean, kind.image_std = [mean] * 3, [spread] * 3
    processor.save_pretrained(directory)
    return Path(directory)
