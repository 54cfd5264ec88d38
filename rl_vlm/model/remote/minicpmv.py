"""The code of MiniCPM-V 2.5 and 2.6 (`minicpmv`): the adapter of its model.

The published class has `llm`, `vpm` and `resampler`, and

    get_vllm_embedding(data)       embeddings of a batch, and a list with the features of each row's slices:
                                   (slices, tokens per slice, hidden). `data` can have these features already, as
                                   `vision_hidden_states`, for the places `image_bound` of the rows
    forward(data, **kwargs)        the language model on these embeddings, at `data["position_ids"]`, which it needs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_vlm.model.remote.base import OwnModelOfParts

IMAGE_TOKEN = "<unk>"


def complete(config: Any) -> None:
    """Leave the config as it is: it extends the language model's."""


class MiniCPMV(OwnModelOfParts):
    """Goes before `MiniCPMV` of the checkpoint's code."""

    get_vllm_embedding: Any
    language, tower = "llm", "vpm"

    def get_image_features(self, pixel_values: Tensor, tgt_sizes: Tensor, **_: Any) -> Any:
        """Return the features of slices in the form of transformers' models.

        `pixel_values` (slices, channels, patch, length) are padded on the right, and `tgt_sizes` (slices, 2) are the
        numbers of patches in height and width.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        lengths = (tgt_sizes.prod(-1) * pixel_values.shape[2]).tolist()
        slices = [values[..., :length] for values, length in zip(pixel_values, lengths, strict=True)]
        ids = torch.zeros(1, 1, dtype=torch.long, device=pixel_values.device)
        data = {"input_ids": ids, "pixel_values": [slices], "tgt_sizes": [tgt_sizes], "image_bound": [[]]}
        _, features = self.get_vllm_embedding(data)
        return BaseModelOutputWithPooling(pooler_output=features[0])

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, tgt_sizes: Any = None,
        position_ids: Tensor | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run the published forward on rows with the features of their slices.

        Without positions they are 0, 1, 2, …, as the published training script sets them.
        """
        features: list[Any] = [[] for _ in input_ids]
        bounds: list[Any] = [[] for _ in input_ids]
        if pixel_values is not None:
            found = self.get_image_features(pixel_values, tgt_sizes=tgt_sizes).pooler_output
            places = [(row == self.config.image_token_id).nonzero()[:, 0] for row in input_ids]
            starts = [place[:: found.shape[1]] for place in places]
            features = list(found.split([len(start) for start in starts]))
            bounds = [torch.stack([start, start + found.shape[1]], dim=-1) for start in starts]
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        data = {
            "input_ids": input_ids, "vision_hidden_states": features, "image_bound": bounds,
            "position_ids": position_ids,
        }  # fmt: skip
        return super().forward(data, **kwargs)
