"""Groups to trace a step on: prompts of one image or video and text, with completions of the longest length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL import Image

from rl_vlm.errors import ConfigError
from rl_vlm.model.families import FAMILIES
from rl_vlm.model.family import VIDEO_TYPE, positions_after_videos
from rl_vlm.types import Completion, Group, Prompt, Sample, ScoredGroup, VideoFormat

TEXT_TOKEN = 1
TIME_TOKENS = 9
"""Tokens of the time of a frame, and of the two marks around its pixels."""
MERGED = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v"}
"""Families whose images are grids of patches of any size."""
TILED = {"internvl"}
"""Families whose images are square tiles."""
RESIZED = {"gemma3"}
"""Families that resize every image to one size."""


@dataclass(frozen=True)
class PromptSize:
    """An image or a video, and text."""

    image_pixels: int
    """Pixels of the image, or of each frame."""
    text_tokens: int
    """Tokens of the text. Those between frames count extra."""
    num_frames: int = 0
    """Frames of the video, or 0 for an image."""
    video_format: VideoFormat = "native"


def make_prompt(config: Any, size: PromptSize) -> Prompt:
    """Build a prompt with the shapes that the family's processor makes. Its values and its image are placeholders.

    Raises ConfigError if the shapes of the family's images are unknown.
    """
    family = FAMILIES[config.model_type]
    media = planned_media(config, size)
    is_native = size.num_frames > 0 and size.video_format == "native" and family.videos == "patches"
    token, kind = (getattr(config, family.video_token), VIDEO_TYPE) if is_native else (config.image_token_id, 1)
    runs = [torch.full((length,), token) for length in media.runs]
    times = torch.full((TIME_TOKENS if size.num_frames and len(runs) > 1 else 0,), TEXT_TOKEN)
    between = [part for run in runs for part in (times, run)]
    token_ids = torch.cat([*between, torch.full((size.text_tokens,), TEXT_TOKEN)])
    kinds = (token_ids == token).long() * kind
    token_inputs, inputs = {}, media.inputs
    if family.has_rope_index:
        token_inputs["mm_token_type_ids"] = kinds
    if config.model_type == "gemma3":
        token_inputs["token_type_ids"] = kinds
    as_images = size.num_frames if family.videos is None or size.video_format == "frames" else 0
    images = [Image.new("1", (1, 1))] * (as_images if size.num_frames else 1)
    return Prompt(Sample("planned", [], images, {}, []), token_ids, token_inputs, inputs)


class PlannedMedia(NamedTuple):
    """An image or a video of a planned prompt."""

    runs: list[int]
    """Adjacent placeholder tokens."""
    inputs: dict[str, torch.Tensor]

    @property
    def num_tokens(self) -> int:
        """Return the placeholder tokens, with the tokens of times between them."""
        return sum(self.runs) + TIME_TOKENS * len(self.runs) * (len(self.runs) > 1)


def planned_media(config: Any, size: PromptSize) -> PlannedMedia:
    """Return the image or video of a prompt of this size. Raises ConfigError like `make_prompt`."""
    tokens, inputs = image_inputs(config, size.image_pixels)
    family, number = FAMILIES[config.model_type], size.num_frames
    if not number:
        return PlannedMedia([tokens], inputs)
    if size.video_format == "frames" or family.videos is None:
        names = {name: torch.cat([value] * number) for name, value in inputs.items()}
        return PlannedMedia([tokens] * number, names)
    if config.model_type in TILED:  # a frame is one tile
        tile = inputs["pixel_values"][:1]
        return PlannedMedia([config.image_seq_length] * number, {"pixel_values": torch.cat([tile] * number)})
    joined = config.vision_config.temporal_patch_size
    number = -(-number // joined)
    _, height, width = inputs["image_grid_thw"][0].tolist()
    found = {
        "pixel_values_videos": torch.cat([inputs["pixel_values"]] * number),
        "video_grid_thw": torch.tensor([[number, height, width]]),
    }
    if config.model_type == "qwen2_5_vl":
        found["second_per_grid_ts"] = torch.ones(1)
    is_one_run = family.row_positions is positions_after_videos
    return PlannedMedia([tokens * number] if is_one_run else [tokens] * number, found)


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
