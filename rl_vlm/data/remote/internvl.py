"""InternVL's own code (`internvl_chat`): prompts and tiles as its `chat` and the published `load_image` make them.

An image is cut into square tiles in the grid whose ratio of sides is closest to its own, with a thumbnail of the whole
image if there are several tiles. Each tile becomes `num_image_token` placeholders between <img> and </img>.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from rl_vlm.data.remote.chat import ChatProcessor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Tiles:
    """Cuts images into tiles, by the settings of the model's config."""

    def __init__(self, config: Any) -> None:
        self.side = getattr(config, "force_image_size", None) or config.vision_config.image_size
        self.patch_size = config.vision_config.patch_size
        self.fewest, self.most = config.min_dynamic_patch, config.max_dynamic_patch
        self.has_thumbnail = config.use_thumbnail
        self.tokens_per_tile = int((self.side // self.patch_size) ** 2 * config.downsample_ratio**2)
        self.size = {"height": self.side, "width": self.side}

    def __call__(self, image: Image) -> Tensor:
        """Return the tiles of an image: (tiles, 3, side, side)."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        return torch.stack([(pixels(tile) - mean) / std for tile in self.tiles(image.convert("RGB"))])

    def tiles(self, image: Image) -> Iterator[Image]:
        """Yield the tiles row by row, then the thumbnail."""
        columns, rows = self.grid(image.width, image.height)
        whole = image.resize((columns * self.side, rows * self.side), Resampling.BICUBIC)
        for i in range(columns * rows):
            left, top = i % columns * self.side, i // columns * self.side
            yield whole.crop((left, top, left + self.side, top + self.side))
        if self.has_thumbnail and columns * rows > 1:
            yield image.resize((self.side, self.side), Resampling.BICUBIC)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows. Of grids with equal ratios, the larger one needs an image of half its area."""
        sides = range(1, self.most + 1)
        grids = [(i, j) for i in sides for j in sides if self.fewest <= i * j <= self.most]
        best, smallest = (1, 1), float("inf")
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            difference = abs(width / height - columns / rows)
            is_large = width * height > 0.5 * self.side**2 * columns * rows
            if difference < smallest or (difference == smallest and is_large):
                best, smallest = (columns, rows), difference
        return best


class InternVLProcessor(ChatProcessor):
    """Expands each image to the placeholders of its tiles."""

    image_token = "<IMG_CONTEXT>"
    image_text = "<img><IMG_CONTEXT></img>\n"

    @staticmethod
    def load(path: str, config: Any, source: dict[str, Any]) -> InternVLProcessor:
        """Load the tokenizer of a checkpoint, whose config is given. `source` are arguments of `from_pretrained`."""
        from transformers import AutoTokenizer

        return InternVLProcessor(AutoTokenizer.from_pretrained(path, **source), Tiles(config))

    def __call__(self, text: list[str], images: list[Image] | None = None, **_: Any) -> Any:
        parts = text[0].split(self.image_token)
        tiles = [self.image_processor(image) for image in images or []]
        if len(parts) != len(tiles) + 1:
            raise ValueError(f"{len(tiles)} images and {len(parts) - 1} image tokens in a conversation")
        counts = [len(each) * self.image_processor.tokens_per_tile for each in tiles]
        expanded = [self.image_token * count for count in counts]
        features = self.tokens("".join(part + tokens for part, tokens in zip(parts, [*expanded, ""], strict=True)))
        if tiles:
            features["pixel_values"] = torch.cat(tiles)
        return features


def pixels(image: Image) -> Tensor:
    """Return an image as values from 0 to 1: (3, height, width)."""
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, 3).permute(2, 0, 1) / 255
