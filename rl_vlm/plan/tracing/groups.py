"""Groups to trace a step on: prompts of one image and text, with completions of the longest length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from rl_vlm.errors import ConfigError
from rl_vlm.model.families import FAMILIES, canvas_positions, mrope_positions
from rl_vlm.types import Completion, Group, Prompt, Sample, ScoredGroup

TEXT_TOKEN = 1
MERGED = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v"}
"""Families whose images are grids of patches of any size."""
TILED = {"internvl"}
"""Families whose images are square tiles."""
RESIZED = {"gemma3"}
"""Families that resize every image to one size."""


@dataclass(frozen=True)
class PromptSize:
    """An image and text."""

    image_pixels: int
    text_tokens: int


def make_prompt(config: Any, size: PromptSize) -> Prompt:
    """Build a prompt with the shapes that the family's processor makes. Its values and its image are placeholders.

    Raises ConfigError if the shapes of the family's images are unknown.
    """
    num_images, inputs = image_inputs(config, size.image_pixels)
    image = torch.full((num_images,), config.image_token_id)
    token_ids = torch.cat([image, torch.full((size.text_tokens,), TEXT_TOKEN)])
    kinds = (token_ids == config.image_token_id).long()
    token_inputs = {}
    if FAMILIES[config.model_type].row_positions in (mrope_positions, canvas_positions):
        token_inputs["mm_token_type_ids"] = kinds
    if config.model_type == "gemma3":
        token_inputs["token_type_ids"] = kinds
    return Prompt(Sample("planned", [], [Image.new("1", (1, 1))], {}, []), token_ids, token_inputs, inputs)


def image_inputs(config: Any, pixels: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the placeholder tokens of a square image, and the model's inputs for it."""
    vision = config.vision_config
    if config.model_type in MERGED:
        merge, patch = vision.spatial_merge_size, vision.patch_size
        side = max(1, round((pixels**0.5) / (patch * merge)))
        grid = side * merge
        values = vision.in_channels * getattr(vision, "temporal_patch_size", 1) * patch**2
        return side**2, {
            "pixel_values": torch.empty(grid**2, values, device="meta"),
            "image_grid_thw": torch.tensor([[1, grid, grid]]),
        }
    if config.model_type in TILED:
        side = vision.image_size[0]
        tiles = max(1, round(pixels / side**2))
        tiles += tiles > 1  # a thumbnail of the whole image
        return tiles * config.image_seq_length, {"pixel_values": torch.empty(tiles, 3, side, side, device="meta")}
    if config.model_type in RESIZED:
        side = vision.image_size
        return config.mm_tokens_per_image, {"pixel_values": torch.empty(1, 3, side, side, device="meta")}
    raise ConfigError(
        f"rl-vlm plan knows the images of {', '.join(sorted(MERGED | TILED | RESIZED))}, and not those of "
        f"{config.model_type}"
    )


def make_group(prompt: Prompt, num_completions: int, completion_tokens: int) -> ScoredGroup:
    """Build a group whose rewards differ, so that every completion is trained on."""
    rewards = torch.arange(num_completions, dtype=torch.float32)
    token_ids = torch.full((completion_tokens,), TEXT_TOKEN)
    completions = [Completion(token_ids, torch.zeros(completion_tokens), "length", "")] * num_completions
    return ScoredGroup(
        Group("planned", prompt, completions, policy_version=0),
        scores_GF=rewards[:, None],
        rewards_G=rewards,
        advantages_G=torch.ones(num_completions),
        valid_G=torch.ones(num_completions, dtype=torch.bool),
        has_variance=True,
    )
