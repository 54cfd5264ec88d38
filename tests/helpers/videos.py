"""Prompts with videos, and what the model's own forward computes of them with our positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image
from torch import Tensor

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.model.policy import Policy
from rl_vlm.types import Prompt, Sample, ScoredGroup, Video, VideoFormat
from tests.helpers.builders import make_group, noise_image, processor_of, take_gradients
from tests.helpers.family_parity import Scores, weighted_sum

IMAGE = noise_image(32, 24, seed=9)
LENGTHS = [5, 1, 9, 3]


def noise_video(
    num_frames: int, seed: int, size: tuple[int, int] = (32, 24), fps: float = 2.0, step: int = 12
) -> Video:
    """Frames of noise of this width and height, shown at `fps`, of a file that has `step` times as many."""
    width, height = size
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(256, (num_frames, height, width, 3), generator=generator, dtype=torch.uint8).numpy()
    indices = tuple(i * step for i in range(num_frames))
    return Video(frames, indices, fps * step, num_frames * step, num_frames / fps)


def video_prompt(
    checkpoint: Path,
    media: Sequence[Image.Image | Video],
    text: str = "What moves?",
    video_format: VideoFormat = "native",
) -> Prompt:
    """A prompt with images and videos in this order, before the text."""
    kinds = ["video" if isinstance(each, Video) else "image" for each in media]
    messages = [{"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]}]
    videos = [each for each in media if isinstance(each, Video)]
    images = [each for each in media if not isinstance(each, Video)]
    builder = PromptBuilder(processor_of(checkpoint), DataConfig(), video_format=video_format)
    return builder.build(Sample(text, messages, images, {}, messages, videos=videos))


LONG = [noise_video(32, seed=1, size=(16, 16))]
"""On the time axis it is much longer than its grid is wide."""
CASES: dict[str, list[tuple[list[Any], str]]] = {
    "one video": [([noise_video(4, seed=1)], "What moves?")],
    "odd number of frames": [([noise_video(5, seed=1)], "What moves?")],
    "two videos": [([noise_video(4, seed=1), noise_video(6, seed=2)], "What moves?")],
    "image and video": [([IMAGE, noise_video(4, seed=1)], "What moves?")],
    "packed prompts": [
        ([noise_video(4, seed=1), IMAGE], "What moves?"),
        ([IMAGE], "What is it?"),
        ([noise_video(6, seed=3)], "Which way?"),
    ],
    "long in time": [(LONG, "What moves?")],
}
"""Images and videos of each prompt of a micro-batch, and its text."""
EQUAL_LENGTHS = {
    "InternVLProcessor", "MiniCPMV4_6Processor", "MiniCPMV4_7Processor", "LlavaOnevisionProcessor",
    "PerceptionLMProcessor",
}  # fmt: skip
"""Processors that take videos of one prompt only if they have equally many frames."""


def case_groups(checkpoint: Path, case: str, dtype: torch.dtype = torch.float32) -> list[ScoredGroup]:
    media_and_text = CASES[case]
    if case == "two videos" and type(processor_of(checkpoint)).__name__ in EQUAL_LENGTHS:
        media_and_text = [([noise_video(4, seed=1), noise_video(4, seed=2)], "What moves?")]
    prompts = [video_prompt(checkpoint, media, text) for media, text in media_and_text]
    for prompt in prompts:
        for name, value in prompt.mm_inputs.items():
            if value.is_floating_point():
                prompt.mm_inputs[name] = value.to(dtype)
    return [make_group(prompt, LENGTHS, seed=i) for i, prompt in enumerate(prompts)]


def own_scores(policy: Policy, groups: Sequence[ScoredGroup]) -> Scores:
    """Of the model's own forward with our positions, on one row at a time."""
    pairs = [(group.group.prompt, c.token_ids) for group in groups for c in group.group.completions]
    logprobs = torch.cat([own_logprobs(policy, prompt, token_ids) for prompt, token_ids in pairs])
    weighted_sum(logprobs).backward()
    return Scores(logprobs.detach(), take_gradients(policy))


def own_logprobs(
    policy: Policy, prompt: Prompt, token_ids: Tensor, positions: Tensor | None = None, banned: Sequence[int] = ()
) -> Tensor:
    """Log-probs of a completion without banned tokens. `positions` are the prompt's, by default ours."""
    model: Any = policy.transformer
    inputs = {"input_ids": torch.cat([prompt.token_ids, token_ids])}
    inputs |= {name: torch.cat([row, torch.zeros_like(token_ids)]) for name, row in prompt.token_inputs.items()}
    inputs = {name: row[None] for name, row in inputs.items()}
    if positions is None:
        positions = policy.family.prompt_positions(model, prompt)
    later = positions.max() + 1 + torch.arange(len(token_ids))
    positions = torch.cat([positions, later.expand(len(positions), -1)], dim=1)
    inputs["position_ids"] = positions[:, None] if len(positions) > 1 else positions
    counts = {name: prompt.mm_inputs[name] for name in ("num_frames_per_video",) if name in prompt.mm_inputs}
    if counts:  # Gemma 4's own forward does not hand them on
        inner = model.base_model
        with mock.patch.object(inner, "get_video_features", partial(inner.get_video_features, **counts)):
            logits = model(**inputs, **prompt.mm_inputs).logits
    elif fails(model, prompt):
        inputs["inputs_embeds"] = embedded(model, prompt, inputs.pop("input_ids"))
        logits = model(**inputs).logits
    else:
        logits = model(**inputs, **prompt.mm_inputs).logits
    logits = logits[0, len(prompt.token_ids) - 1 : -1]
    logits[:, list(banned)] = -torch.inf
    return logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]


def fails(model: Any, prompt: Prompt) -> bool:
    """Whether the model's own forward does not take the prompt: GLM-V's takes no images beside videos.

    Gemma 4's and Kimi's take no videos.
    """
    kind = model.config.model_type
    mixes = bool(prompt.sample.images and prompt.sample.videos)
    return (kind.startswith("glm") and mixes) or (kind.startswith(("gemma4", "kimi")) and bool(prompt.sample.videos))


def embedded(model: Any, prompt: Prompt, input_ids: Tensor) -> Tensor:
    """The input of the language model, with features of the tower, which is called for each image and each grid of
    videos.
    """
    inner, config = model.base_model, model.config
    embeddings = inner.get_input_embeddings()(input_ids)
    found = features_by_kind(inner, prompt)
    if not (input_ids == config.video_token_id).any():  # GLM-V has the token of images for both
        blocks = [block["type"] for block in prompt.sample.messages[0]["content"] if block["type"] in found]
        in_turn = {kind: iter(features) for kind, features in found.items()}
        found = {"image": [next(in_turn[kind]) for kind in blocks]}
    for kind, features in found.items():
        mask = (input_ids == getattr(config, f"{kind}_token_id"))[..., None]
        embeddings = embeddings.masked_scatter(mask, torch.cat(features).to(embeddings))
    return embeddings


def features_by_kind(inner: Any, prompt: Prompt) -> dict[str, list[Tensor]]:
    """The features of each image, and of each grid of videos, from the model's own modules."""
    getters = {"image": inner.get_image_features, "video": inner.get_video_features}

    def of_grid(kind: str, pixels: Tensor, grid: Tensor) -> Tensor:
        if hasattr(inner, "mm_projector"):  # Kimi's getters split features as if frames were not joined
            return inner.mm_projector(inner.vision_tower(pixels, grid_thw=grid).pooler_output).flatten(0, 1)
        return torch.cat(list(getters[kind](pixels, grid, return_dict=True).pooler_output))

    found = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if name in prompt.mm_inputs:
            grids = prompt.mm_inputs[f"{kind}_grid_thw"]
            parts = prompt.mm_inputs[name].split(grids.prod(-1).tolist())
            found[kind] = [of_grid(kind, part, grid[None]) for part, grid in zip(parts, grids, strict=True)]
    return found
