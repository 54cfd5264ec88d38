"""Check that pixels reach the model: with other images or videos, the log-probs of a completion must change.

prompt ─ the same prompt again                       ─► noise of the arithmetic
       ─ another row's images or videos, noise images ─► effect, which must be larger
       ─ frames of videos in reverse order            ─► effect, which must be larger
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rl_vlm.data.check import UsableRows
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import Severity
from rl_vlm.model.policy import Policy
from rl_vlm.tools.checks.diagnosis import Checking, Note
from rl_vlm.tools.checks.rows import about_row
from rl_vlm.types import Completion, Forward, Group, MicroBatch, Prompt, Sample, ScoredGroup, SubGroup, Video

NUM_ROWS = 4
LEAST_EFFECT = 1e-6
"""Pixels have an effect if a log-prob changes by more than this, and by more than ten times the noise."""
TEXT = "The answer is <answer>7</answer>."
BLIND = (
    "Load another checkpoint, or correct its vision tower and projector: a run would train on text alone, and its "
    "reward may rise all the same."
)
UNORDERED = (
    "The model cannot tell when something happens in a video. Load another checkpoint, or set data.video_format: "
    "frames, which writes the time of each frame."
)


class PixelChange(NamedTuple):
    """A change of a prompt's pixels that must change log-probs, and the finding if it does not."""

    what: str
    kind: str = "pixels that do not reach the model"
    remedy: str = BLIND
    severity: Severity = "error"


IMAGES, VIDEOS = PixelChange("other images"), PixelChange("other videos")
REVERSED = PixelChange("frames in reverse order", "order of frames that does not reach the model", UNORDERED, "warning")


def check_pixels(policy: Policy, builder: PromptBuilder, usable: UsableRows) -> Checking[None]:
    """Yield a finding for each row whose pixels do not change log-probs. Try the first `NUM_ROWS` rows with pixels."""
    samples = first_samples(usable)
    if not samples:
        yield Note("whether pixels reach the model: no row has an image or a video", is_checked=False)
        return
    effects: dict[PixelChange, list[float]] = {}
    for i, (row, sample) in enumerate(samples):
        other = samples[(i + 1) % len(samples)][1]
        found, noise = pixel_effects(policy, builder, sample, other)
        for change, effect in found.items():
            effects.setdefault(change, []).append(effect)
            if effect <= max(LEAST_EFFECT, 10 * noise):
                what = f": with {change.what} the log-probs of a completion change by {effect:.1e}"
                yield about_row(usable.rows, row, change.kind, what, change.remedy, change.severity)
    for change, values in effects.items():
        yield Note(f"pixels of {len(values)} rows: {change.what} change a log-prob by {min(values):.1e} or more")


def first_samples(usable: UsableRows) -> list[tuple[int, Sample]]:
    """Return the first `NUM_ROWS` rows with images or videos."""
    found = []
    for row in usable.indices:
        if usable.num_pixels.get(row, 0) > 0 or row in usable.headers:
            found.append((row, usable.rows[row]))
        if len(found) == NUM_ROWS:
            break
    return found


def pixel_effects(
    policy: Policy, builder: PromptBuilder, sample: Sample, other: Sample
) -> tuple[dict[PixelChange, float], float]:
    """Return the largest change of a log-prob with each change of pixels, and that in a second pass (noise)."""
    token_ids = torch.tensor(builder.processor.tokenizer.encode(TEXT, add_special_tokens=False))
    expected, again = (logprobs(policy, builder.build(sample), token_ids) for _ in range(2))
    effects: dict[PixelChange, float] = {}
    for change, changed in changes(sample, other):
        found = logprobs(policy, builder.build(changed), token_ids)
        effects[change] = max(effects.get(change, 0.0), (found - expected).abs().max().item())
    return effects, (again - expected).abs().max().item()


def changes(sample: Sample, other: Sample) -> Iterator[tuple[PixelChange, Sample]]:
    """Yield the sample with other pixels. Their sizes and times stay, so the tokens stay the same."""
    if sample.images:
        if other.images:
            yield IMAGES, with_images(sample, [other.images[0].resize(image.size) for image in sample.images])
        unlike = [Image.fromarray(noise((image.height, image.width, 3))) for image in sample.images]
        yield IMAGES, with_images(sample, unlike)
    if sample.videos:
        if other.videos:
            yield VIDEOS, with_frames(sample, [frames_like(video, other.videos[0]) for video in sample.videos])
        yield VIDEOS, with_frames(sample, [noise(video.frames.shape) for video in sample.videos])
        backwards = [video.frames[::-1] for video in sample.videos]
        if any((each != video.frames).any() for each, video in zip(backwards, sample.videos, strict=True)):
            yield REVERSED, with_frames(sample, backwards)


def with_images(sample: Sample, images: Sequence[Image.Image]) -> Sample:
    """Return the sample with other images."""
    return replace(sample, images=list(images), encoded_images={})


def with_frames(sample: Sample, frames: Sequence[np.ndarray]) -> Sample:
    """Return the sample with other frames of its videos, at the same times."""
    pairs = zip(sample.videos, frames, strict=True)
    return replace(sample, videos=[replace(video, frames=np.ascontiguousarray(each)) for video, each in pairs])


def frames_like(video: Video, other: Video) -> np.ndarray:
    """Return frames of another video with this video's number and size of frames."""
    number, height, width = video.frames.shape[:3]
    chosen = np.linspace(0, len(other.frames) - 1, number).round().astype(int)
    return np.stack([np.array(Image.fromarray(other.frames[i]).resize((width, height))) for i in chosen])


def noise(shape: Sequence[int]) -> np.ndarray:
    """Return random pixels. Every call returns the same ones."""
    return np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)


@torch.no_grad()
def logprobs(policy: Policy, prompt: Prompt, token_ids: Tensor) -> Tensor:
    """Compute the log-probs of a completion of a prompt."""
    one = torch.zeros(1)
    completion = Completion(token_ids, torch.zeros(len(token_ids)), "length", TEXT)
    group = Group("doctor", prompt, [completion], policy_version=0)
    scored = ScoredGroup(group, one[:, None], one, one, valid_G=one == 0, has_variance=True)
    policy.start_step()
    return policy(Forward(MicroBatch([SubGroup(scored, [0])], shared=False))).logprobs_NT.float().cpu()
