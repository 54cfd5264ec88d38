"""Prompts that exceed the token budget by themselves, so that no division into micro-batches stays within it.

    a group that is cut    images of one prompt  │  prompt and one completion  │  prompt and one completion  │ …

A completion may take a row beyond the budget, since its length is not known before: it gets a micro-batch of its own. A
prompt that leaves no token for it is an error of the settings, found at the start or when the row is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_vlm.errors import DataError, shorten
from rl_vlm.types import Prompt

if TYPE_CHECKING:
    from rl_vlm.model.vision import VisionEncoder

logger = logging.getLogger(__name__)


@dataclass
class PromptLimit:
    """What the budget that a run starts with leaves for one prompt."""

    budget: int
    is_set: bool
    """Whether the budget is from the settings. A larger prompt is then an error; under `auto` it gets a warning."""
    vision: VisionEncoder
    min_pixels: int | None
    """The least that data.max_pixels can be, or None if it has no effect on the processor."""
    has_warned: bool = field(default=False, init=False)

    def tokens(self, prompt: Prompt) -> int:
        """Return the smallest budget for a prompt: that of its images, or of its tokens and one of a completion."""
        return max(self.vision.tokens(prompt), len(prompt.token_ids) + 1)

    def check(self, prompts: Mapping[str, Prompt]) -> None:
        """Raise DataError if any prompt exceeds the budget, or log a warning once if the budget is not set.

        `prompts` are given by the names of their rows. The message describes the largest and names the others.
        """
        if self.has_warned:
            return
        large = sorted(
            (row for row, prompt in prompts.items() if self.tokens(prompt) > self.budget),
            key=lambda row: self.tokens(prompts[row]),
            reverse=True,
        )
        if not large:
            return
        others = f" Others exceed it as well: {shorten(', '.join(large[1:]))}." if len(large) > 1 else ""
        message = f"{large[0]}: {self.describe(prompts[large[0]])}{others}"
        if self.is_set:
            raise DataError(message)
        logger.warning("%s A micro-batch with such a prompt may not fit in memory.", message)
        self.has_warned = True

    def describe(self, prompt: Prompt) -> str:
        """Say what exceeds the budget, and which settings fit."""
        sizes = ", ".join(f"{image.width}x{image.height}" for image in prompt.sample.images)
        price, needed = self.vision.tokens(prompt), self.tokens(prompt)
        if price == needed:
            what = f"its images of {sizes} pixels count as {price} tokens in the vision tower"
        else:
            images = f" with images of {sizes} pixels" if sizes else ""
            what = f"its prompt{images} has {len(prompt.token_ids)} tokens, which with one of a completion are {needed}"
        pixels = self.fitting_pixels(prompt)
        lower = f", or data.max_pixels to at most {pixels}" if pixels else ""
        return (
            f"Sample {prompt.sample.sample_id}: {what}, more than memory.micro_batch_tokens {self.budget}, and a "
            f"micro-batch cannot hold less. Set memory.micro_batch_tokens to at least {needed}{lower}."
        )

    def fitting_pixels(self, prompt: Prompt) -> int | None:
        """Return a `data.max_pixels` with which the prompt fits, or None if there is none."""
        if self.min_pixels is None or not prompt.sample.images:
            return None
        price, (placeholders,) = self.vision.tokens(prompt), self.vision.placeholders([prompt])
        left_by_text = self.budget - 1 - (len(prompt.token_ids) - placeholders)
        shares = [1.0, left_by_text / placeholders, self.budget / price if price else 1.0]
        pixels = int(self.vision.pixels(prompt) / len(prompt.sample.images) * min(shares))
        return pixels if pixels >= self.min_pixels else None
