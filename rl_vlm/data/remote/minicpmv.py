"""The code of MiniCPM-V 2.5 and 2.6 (`minicpmv`): its processor, called as its `chat` calls it.

The published processor takes lists of texts and of images, and returns slices of images as lists of tensors
(3, patch, height x width x patch), with the numbers of patches in `tgt_sizes`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor

from rl_vlm.data.remote.chat import ChatProcessor


class MiniCPMVProcessor(ChatProcessor):
    """Pads the slices of all images to one tensor."""

    image_token = "<unk>"
    image_text = "(<image>./</image>)\n"
    img_patch_token = "(<image>./</image>)"
    """The text of a place for an image, which a sample's text must not hold."""

    def __init__(self, processor: Any) -> None:
        super().__init__(processor.tokenizer, processor.image_processor)
        self.processor = processor

    @staticmethod
    def load(path: str, config: Any, source: dict[str, Any]) -> MiniCPMVProcessor:
        """Load the processor of a checkpoint. `source` are arguments of `from_pretrained`."""
        from transformers import AutoProcessor

        return MiniCPMVProcessor(AutoProcessor.from_pretrained(path, **source))

    def __call__(self, text: list[str], images: list[Image] | None = None, **_: Any) -> Any:
        from transformers import BatchFeature

        if not images:
            return self.tokens(text[0])
        found = self.processor(text, [[image.convert("RGB") for image in images]], return_tensors="pt")
        return BatchFeature(
            {
                "input_ids": torch.as_tensor(found["input_ids"]),
                "pixel_values": padded(found["pixel_values"][0]),
                "tgt_sizes": torch.as_tensor(found["tgt_sizes"][0]),
            }
        )

    def save_pretrained(self, directory: Any) -> None:
        """Write the published processor."""
        self.processor.save_pretrained(directory)


def padded(slices: list[Tensor]) -> Tensor:
    """Stack slices of different lengths, with zeros on the right: (slices, 3, patch, length)."""
    length = max(each.shape[-1] for each in slices)
    return torch.stack([F.pad(each, (0, length - each.shape[-1])) for each in slices])
