"""The token that takes the place of pixels, by the names that configs and processors have for it."""

from __future__ import annotations

from typing import Any

IMAGE_TOKENS = ("image_token_id", "image_token_index", "img_context_token_id", "media_placeholder_token_id")
"""Keys of configs that hold the token id of an image's placeholder."""
IMAGE_BECOMES = {"Ovis2Processor": "<IMG_ATOM>"}
"""Placeholder token for pixels in a prompt, by processor class, if it differs from the processor's `image_token`."""


def image_token_key(config: Any) -> str | None:
    """Return the key in `IMAGE_TOKENS` under which a config has a token, or None."""
    return next((each for each in IMAGE_TOKENS if isinstance(getattr(config, each, None), int)), None)


def image_token_id(processor: Any) -> int | None:
    """Return the id of a token that only prompts with images contain, or None if the processor has none."""
    convert = processor.tokenizer.convert_tokens_to_ids
    if (becomes := IMAGE_BECOMES.get(type(processor).__name__)) is not None:
        return convert(becomes)
    found = [getattr(owner, "image_token_id", None) for owner in (processor, processor.tokenizer)]
    token = getattr(processor, "image_token", None)  # BLIP-2's is an object of the tokenizers package
    return next((each for each in found if each is not None), convert(str(token)) if token else None)
