"""Prompts that exceed the token budget alone, however they are split into micro-batches.

    a group that is cut    images of one prompt  │  prompt and one completion  │  prompt and one completion  │ …

A row may exceed the budget by its completion, whose length is not known before. It then gets its own micro-batch. If a
prompt leaves no token for a completion, the settings are wrong: this is found at the start or when the row is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rl_vlm.data.prompts import SmallestPixels
from rl_vlm.errors import DataError, shorten
from rl_vlm.passes.budget import TokenBudget
from rl_vlm.types import Prompt, Sample

logger = logging.getLogger(__name__)


class LargePrompts:
    """Finds prompts that alone exceed the budget that the run starts with."""

    def __init__(self, budget: TokenBudget, smallest: SmallestPixels) -> None:
        """`smallest` are the smallest limits on pixels that advice may name."""
        self.budget = budget
        self.smallest = smallest
        self.has_warned = False

    def check(self, prompts: Mapping[str, Prompt]) -> None:
        """Raise DataError if a prompt exceeds the budget. Under `auto`, log a warning once instead.

        `prompts` are keyed by the names of their rows.
        """
        if self.has_warned or (message := self.problem_of(prompts)) is None:
            return
        if self.budget.setting != "auto":
            raise DataError(message)
        logger.warning("%s A micro-batch with such a prompt may not fit in memory.", message)
        self.has_warned = True

    def problem_of(self, prompts: Mapping[str, Prompt]) -> str | None:
        """Describe the largest prompt that exceeds the budget, and name the others. Return None if all fit."""
        needed = {row: self.needed_tokens(prompt) for row, prompt in prompts.items() if self.exceeds(prompt)}
        large = sorted(needed, key=needed.__getitem__, reverse=True)
        if not large:
            return None
        others = f" Others exceed it as well: {shorten(', '.join(large[1:]))}." if len(large) > 1 else ""
        return f"{large[0]}: {self.describe(prompts[large[0]])}{others}"

    def exceeds(self, prompt: Prompt) -> bool:
        """Return whether a prompt exceeds the budget."""
        return self.needed_tokens(prompt) > self.budget.planned.tokens

    def needed_tokens(self, prompt: Prompt) -> int:
        """Return the smallest budget that fits a prompt: its images, or its tokens plus one for a completion."""
        return max(self.budget.price(prompt), len(prompt.token_ids) + 1)

    def describe(self, prompt: Prompt) -> str:
        """Explain why a prompt exceeds the budget, and name settings that fit."""
        media = prompt.sample.media_text
        price, needed = self.budget.price(prompt), self.needed_tokens(prompt)
        if price == needed:
            what = f"its {media} count as {price} tokens in the vision tower"
        else:
            what = f"its prompt{f' with {media}' if media else ''} and one token of a completion have {needed} tokens"
        pixels = "data.video_max_pixels" if prompt.sample.all_videos else "data.max_pixels"
        fitting = {"data.max_frames": self.fitting_frames(prompt), pixels: self.fitting_pixels(prompt)}
        lower = "".join(f", or {name} to at most {value}" for name, value in fitting.items() if value)
        return (
            f"Sample {prompt.sample.sample_id}: {what}, more than memory.micro_batch_tokens "
            f"{self.budget.planned.tokens}. A micro-batch cannot be smaller. Set memory.micro_batch_tokens to at "
            f"least {needed}{lower}."
        )

    def fitting_pixels(self, prompt: Prompt) -> int | None:
        """Return pixels of each image, or of each frame, with which the prompt fits, or None if there are none."""
        sample = prompt.sample
        least = self.smallest.frame if sample.all_videos else self.smallest.image
        num_media = num_frames(sample) or len(sample.images)
        if least is None or not num_media or (sample.own_images and sample.all_videos):  # both: they have a limit each
            return None
        of_videos = sum(video.frames[..., 0].size for video in sample.videos)
        pixels = int((of_videos or self.budget.vision.pixels(prompt)) / num_media * self.fitting_share(prompt))
        return pixels if pixels >= least else None

    def fitting_frames(self, prompt: Prompt) -> int | None:
        """Return a limit on the frames of each video with which the prompt fits, or None if there is none.

        The text around a video's frames is assumed to stay.
        """
        sample = prompt.sample
        if sample.own_images or not sample.all_videos:
            return None
        lengths = [len(video.frames) for video in sample.all_videos]
        kept = int(num_frames(sample) * self.fitting_share(prompt))
        vision_config = self.budget.vision.model.config.vision_config
        joined = getattr(vision_config, "temporal_patch_size", 1) if sample.videos else 1
        limits = range(joined, max(lengths) + 1, joined)
        return max((limit for limit in limits if sum(min(each, limit) for each in lengths) <= kept), default=None)

    def fitting_share(self, prompt: Prompt) -> float:
        """Return the largest share of the prompt's pixels that fits."""
        vision, tokens, price = self.budget.vision, self.budget.planned.tokens, self.budget.price(prompt)
        (placeholders,) = vision.placeholders([prompt])
        left_by_text = tokens - 1 - (len(prompt.token_ids) - placeholders)
        return max(0.0, min(1.0, left_by_text / placeholders, tokens / price if price else 1.0))


def num_frames(sample: Sample) -> int:
    """Return the number of frames of all videos."""
    return sum(len(video.frames) for video in sample.all_videos)
