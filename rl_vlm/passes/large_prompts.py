"""Prompts that exceed the token budget alone, however they are split into micro-batches.

    a group that is cut    images of one prompt  │  prompt and one completion  │  prompt and one completion  │ …

A row may exceed the budget by its completion, whose length is not known before. It then gets its own micro-batch. If a
prompt leaves no token for a completion, the settings are wrong: this is found at the start or when the row is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl_vlm.errors import shorten
from rl_vlm.types import Prompt

if TYPE_CHECKING:
    from rl_vlm.passes.budget import TokenBudget


def problem_of(prompts: Mapping[str, Prompt], budget: TokenBudget) -> str | None:
    """Describe the largest prompt that exceeds the budget, and name the others. Return None if all fit.

    `prompts` are keyed by the names of their rows.
    """
    needed = {row: needed_tokens(prompt, budget) for row, prompt in prompts.items() if exceeds(prompt, budget)}
    large = sorted(needed, key=needed.__getitem__, reverse=True)
    if not large:
        return None
    others = f" Others exceed it as well: {shorten(', '.join(large[1:]))}." if len(large) > 1 else ""
    return f"{large[0]}: {describe(prompts[large[0]], budget)}{others}"


def exceeds(prompt: Prompt, budget: TokenBudget) -> bool:
    """Return whether a prompt alone exceeds the budget that the run starts with."""
    return needed_tokens(prompt, budget) > budget.planned.tokens


def needed_tokens(prompt: Prompt, budget: TokenBudget) -> int:
    """Return the smallest budget that fits a prompt: its images, or its tokens plus one for a completion."""
    return max(budget.price(prompt), len(prompt.token_ids) + 1)


def describe(prompt: Prompt, budget: TokenBudget) -> str:
    """Explain why a prompt exceeds the budget, and name settings that fit."""
    sizes = ", ".join(f"{image.width}x{image.height}" for image in prompt.sample.images)
    price, needed = budget.price(prompt), needed_tokens(prompt, budget)
    if price == needed:
        what = f"its images of {sizes} pixels count as {price} tokens in the vision tower"
    else:
        images = f" with images of {sizes} pixels" if sizes else ""
        what = f"its prompt{images} has {len(prompt.token_ids)} tokens, which with one of a completion are {needed}"
    pixels = fitting_pixels(prompt, budget)
    lower = f", or data.max_pixels to at most {pixels}" if pixels else ""
    return (
        f"Sample {prompt.sample.sample_id}: {what}, more than memory.micro_batch_tokens {budget.planned.tokens}, and a "
        f"micro-batch cannot hold less. Set memory.micro_batch_tokens to at least {needed}{lower}."
    )


def fitting_pixels(prompt: Prompt, budget: TokenBudget) -> int | None:
    """Return a `data.max_pixels` with which the prompt fits, or None if there is none."""
    if budget.min_pixels is None or not prompt.sample.images:
        return None
    tokens, price, (placeholders,) = budget.planned.tokens, budget.price(prompt), budget.vision.placeholders([prompt])
    left_by_text = tokens - 1 - (len(prompt.token_ids) - placeholders)
    shares = [1.0, left_by_text / placeholders, tokens / price if price else 1.0]
    pixels = int(budget.vision.pixels(prompt) / len(prompt.sample.images) * min(shares))
    return pixels if pixels >= budget.min_pixels else None
