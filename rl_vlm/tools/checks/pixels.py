"""Check that pixels reach the model: with other images, the log-probs of a completion must change.

prompt ─ the same prompt again            ─► noise of the arithmetic
       ─ another row's image, noise image ─► effect, which must be larger
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rl_vlm.data.check import UsableRows
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.model.policy import Policy
from rl_vlm.tools.checks.diagnosis import Checking, Note
from rl_vlm.tools.checks.rows import about_row
from rl_vlm.types import Completion, Forward, Group, MicroBatch, Prompt, Sample, ScoredGroup, SubGroup

NUM_ROWS = 4
LEAST_EFFECT = 1e-6
"""Pixels have an effect if a log-prob changes by more than this, and by more than ten times the noise."""
TEXT = "The answer is <answer>7</answer>."
BLIND = (
    "Load another checkpoint, or correct its vision tower and projector: a run would train on text alone, and its "
    "reward may rise all the same."
)


def check_pixels(policy: Policy, builder: PromptBuilder, usable: UsableRows) -> Checking[None]:
    """Yield a finding for each row whose pixels do not change log-probs. Try the first `NUM_ROWS` rows with images."""
    samples = first_samples(usable)
    if not samples:
        yield Note("whether pixels reach the model: no row has an image", is_checked=False)
        return
    effects = []
    for i, (row, sample) in enumerate(samples):
        other = samples[(i + 1) % len(samples)][1]
        effect, noise = pixel_effect(policy, builder, sample, other)
        effects.append(effect)
        if effect <= max(LEAST_EFFECT, 10 * noise):
            what = f": with other images the log-probs of a completion change by {effect:.1e}"
            yield about_row(usable.rows, row, "pixels that do not reach the model", what, BLIND, "error")
    yield Note(f"pixels of {len(samples)} rows: other images change a log-prob by {min(effects):.1e} or more")


def first_samples(usable: UsableRows) -> list[tuple[int, Sample]]:
    """Return the first `NUM_ROWS` rows with images."""
    found = []
    for row in usable.indices:
        if usable.num_pixels.get(row, 0) > 0:
            found.append((row, usable.rows[row]))
        if len(found) == NUM_ROWS:
            break
    return found


def pixel_effect(policy: Policy, builder: PromptBuilder, sample: Sample, other: Sample) -> tuple[float, float]:
    """Return the largest change of a log-prob with other images, and its largest change in a second pass (noise)."""
    token_ids = torch.tensor(builder.processor.tokenizer.encode(TEXT, add_special_tokens=False))
    exchanged = [other.images[0].resize(image.size) for image in sample.images]
    noise = [noise_image(image.size) for image in sample.images]
    expected, again, *changed = (
        logprobs(policy, builder.build(one), token_ids)
        for one in (sample, sample, with_images(sample, exchanged), with_images(sample, noise))
    )
    effects = [(found - expected).abs().max().item() for found in changed]
    return max(effects), (again - expected).abs().max().item()


def with_images(sample: Sample, images: Sequence[Image.Image]) -> Sample:
    """Return the sample with other images. They have the same sizes, so the tokens stay the same."""
    return replace(sample, images=list(images), encoded_images={})


def noise_image(size: tuple[int, int]) -> Image.Image:
    """Return an image of random pixels. Every call returns the same pixels."""
    width, height = size
    return Image.fromarray(np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8))


@torch.no_grad()
def logprobs(policy: Policy, prompt: Prompt, token_ids: Tensor) -> Tensor:
    """Compute the log-probs of a completion of a prompt."""
    one = torch.zeros(1)
    completion = Completion(token_ids, torch.zeros(len(token_ids)), "length", TEXT)
    group = Group("doctor", prompt, [completion], policy_version=0)
    scored = ScoredGroup(group, one[:, None], one, one, valid_G=one == 0, has_variance=True)
    policy.start_step()
    return policy(Forward(MicroBatch([SubGroup(scored, [0])], shared=False))).logprobs_NT.float().cpu()
