"""The code of CogVLM and CogVLM2 (`CogVLMForCausalLM`): the adapter of its model.

The published class has `lm_head` and `model`: embeddings, layers, and the vision tower `vision`. Layers have weights
for images and weights for text, and choose by `token_type_ids`.

    model.encode_images(images)    images [[tensor], ...] of each row: (images, tokens per image, hidden)
    model.llm_forward(...)         the layers on `inputs_embeds`; keys and values are tuples, as `past_key_values` too
    forward(input_ids, images, token_type_ids, attention_mask, ...)
    build_position_ids(token_type_ids, attention_mask)      a function of the same file: tokens in an image share one
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_vlm.config.own_code import VISION_TOKEN_TYPE
from rl_vlm.model.remote.base import OwnModel

if TYPE_CHECKING:
    from transformers import Cache


def complete(config: Any) -> None:
    """Leave the config as it is: it is the language model's."""


class CogVLM(OwnModel):
    """Goes before `CogVLMForCausalLM` of the checkpoint's code."""

    model: Any
    lm_head: Any
    tower = "model.vision"
    first_images_only = "its code puts the image before all text"

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.model.embed_tokens.register_forward_hook(in_precision)

    def get_image_features(self, pixel_values: Tensor, **_: Any) -> Any:
        """Return the features of images in the form of transformers' models."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=self.model.encode_images([[image] for image in pixel_values]))

    def get_rope_index(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, None]:
        """Return the published positions (1, rows, tokens), in the form of transformers' models."""
        published = sys.modules[type(self).__module__]
        return published.build_position_ids(token_type_ids, attention_mask)[None], None

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None, position_ids: Tensor | None = None, past_key_values: Cache | None = None,
        use_cache: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        """Run the published forward. If positions are given, run its layers at these, with a cache of transformers."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if position_ids is None:
            images = None if pixel_values is None else [[image] for image in pixel_values]
            return super().forward(
                input_ids=input_ids, images=images, token_type_ids=token_type_ids, attention_mask=attention_mask,
                use_cache=False, return_dict=True,
            )  # fmt: skip
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        embeddings = self.model.embed_tokens(input_ids)
        if pixel_values is not None:
            features = self.get_image_features(pixel_values).pooler_output.flatten(0, -2)
            embeddings = embeddings.index_put([types == VISION_TOKEN_TYPE], features.to(embeddings))
        output = self.model.llm_forward(
            token_type_ids=types, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=as_tuples(past_key_values), inputs_embeds=embeddings, use_cache=use_cache,
            return_dict=True,
        )  # fmt: skip
        if past_key_values is not None:
            append(past_key_values, output.past_key_values)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state), past_key_values=past_key_values)


def in_precision(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Return embeddings in the precision of autocast.

    Each layer makes a tensor with the dtype of its input, and writes products of autocast into it.
    """
    device = output.device.type
    return output.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else output


def as_tuples(cache: Cache | None) -> tuple[tuple[Tensor, Tensor], ...] | None:
    """Return the keys and values (rows, heads, tokens, dim) of each layer, or None if there are no tokens."""
    if cache is None or cache.get_seq_length() == 0:
        return None
    layers: Any = cache.layers
    return tuple((layer.keys, layer.values) for layer in layers)


def append(cache: Cache, layers: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Append new keys and values to a cache. `layers` have all tokens, and the first ones are in the cache."""
    for i, (keys, values) in enumerate(layers):
        known = cache.get_seq_length(i)
        cache.update(keys[:, :, known:], values[:, :, known:], i)
