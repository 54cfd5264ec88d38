"""InternVL's own code (`internvl_chat`: InternVL 1.5 to 3): the adapter of its model.

The published class has `vision_model`, `mlp1` and `language_model`, and

    extract_feature(pixel_values)                                   (tiles, tokens per tile, hidden)
    forward(pixel_values, input_ids, ..., image_flags)              image_flags (tiles, 1): 1 for each tile of an image
    img_context_token_id                                            set by `chat`, from the tokenizer
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_vlm.model.remote.base import OwnModelOfParts

IMAGE_TOKEN = "<IMG_CONTEXT>"


def complete(config: Any) -> None:
    """Name the language model's config as transformers' configs do."""
    config.text_config = config.llm_config


class InternVLChat(OwnModelOfParts):
    """Goes before `InternVLChatModel` of the checkpoint's code."""

    language_model: Any
    language, tower = "language_model", "vision_model"

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.img_context_token_id = config.image_token_id

    def get_image_features(self, pixel_values: Tensor, **_: Any) -> Any:
        """Return the features of tiles in the form of transformers' models."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        published: Any = super()
        return BaseModelOutputWithPooling(pooler_output=published.extract_feature(pixel_values))

    def extract_feature(self, pixel_values: Tensor) -> Tensor:
        """Return the features of tiles to the published forward. In training they may have been computed before."""
        return self.get_image_features(pixel_values).pooler_output

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the published forward, or the language model if there are no images."""
        if pixel_values is None:
            return self.language_model(input_ids=input_ids, **kwargs)
        flags = torch.ones(len(pixel_values), 1, dtype=torch.long, device=pixel_values.device)
        return super().forward(pixel_values=pixel_values, input_ids=input_ids, image_flags=flags, **kwargs)
