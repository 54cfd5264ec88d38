"""Prompts beyond the token budget: which they are, and what is said of them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from rl_vlm.data.frames import frames_as_images
from rl_vlm.data.prompts import SmallestPixels
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.errors import DataError
from rl_vlm.model.vision import VisionEncoder
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.large_prompts import LargePrompts
from rl_vlm.types import Progress, Prompt, Sample, Video
from tests.unit.model.test_vision import make_encoder

PIXELS_PER_PATCH, PATCHES_PER_TOKEN = 196, 4


def make_prompt(name: str, text_tokens: int, *sizes: tuple[int, int]) -> Prompt:
    images = [Image.new("RGB", size) for size in sizes]
    placeholders = sum(w * h for w, h in sizes) // (PIXELS_PER_PATCH * PATCHES_PER_TOKEN)
    return Prompt(Sample(name, [], images, {}, ""), torch.zeros(text_tokens + placeholders, dtype=torch.long), {}, {})


class Tower(VisionEncoder):
    """Patches of 14 x 14 pixels, four of which make one token of the prompt."""

    def pixels(self, prompt: Prompt) -> int:
        """Two frames of a video count once."""
        of_videos = sum(video.frames[::2, ..., 0].size for video in prompt.sample.videos)
        return sum(image.width * image.height for image in prompt.sample.images) + of_videos

    def placeholders(self, prompts: Sequence[Prompt]) -> list[int]:
        return [self.pixels(p) // (PIXELS_PER_PATCH * PATCHES_PER_TOKEN) for p in prompts]


class Priced(TokenBudget):
    """Each patch of a trained tower counts as half a token."""

    def price(self, prompt: Prompt) -> int:
        return 0 if self.vision.is_frozen else self.vision.pixels(prompt) // PIXELS_PER_PATCH // 2


def large_prompts(
    tokens: int, is_set: bool = True, is_frozen: bool = False, min_pixels: int | None = 1, min_frame: int | None = 1
) -> LargePrompts:
    encoder = make_encoder(frozen=is_frozen)
    setting, ranks = tokens if is_set else "auto", Collectives(torch.device("cpu"))
    vision = Tower(encoder.model, encoder.family)
    return LargePrompts(
        Priced(ranks, Progress(1), vision, PlannedBudget(tokens), setting), SmallestPixels(min_pixels, min_frame)
    )


def message(found: LargePrompts, *prompts: Prompt) -> str:
    with pytest.raises(DataError) as error:
        found.check({f"rows, row {i}": prompt for i, prompt in enumerate(prompts)})
    return str(error.value)


def test_images_that_exceed_the_budget_are_named_with_settings_that_fit():
    prompt = make_prompt("a", 10, (280, 280))  # 400 patches, 200 tokens in the tower; 100 placeholder tokens
    large_prompts(200).check({"rows, row 0": prompt})
    assert message(large_prompts(199), prompt) == (
        "rows, row 0: Sample a: its images of 280x280 pixels count as 200 tokens in the vision tower, more than "
        "memory.micro_batch_tokens 199. A micro-batch cannot be smaller. Set memory.micro_batch_tokens to at least "
        "200, or data.max_pixels to at most 78008."
    )
    assert message(large_prompts(100), prompt).endswith("at least 200, or data.max_pixels to at most 39200.")
    assert message(large_prompts(100, min_pixels=39_200), prompt).endswith("or data.max_pixels to at most 39200.")
    for min_pixels in (None, 39_201):  # which the processor would refuse
        assert message(large_prompts(100, min_pixels=min_pixels), prompt).endswith("to at least 200.")


def test_images_of_a_frozen_tower_count_by_their_tokens_in_the_prompt():
    prompt = make_prompt("a", 10, (280, 280))
    large_prompts(111, is_frozen=True).check({"rows, row 0": prompt})
    assert (
        "its prompt with images of 280x280 pixels and one token of a completion have 111 tokens, more than "
        "memory.micro_batch_tokens 110"
    ) in message(large_prompts(110, is_frozen=True), prompt)
    # 61 - 1 - 10 = 50 tokens are left for what has 100 now
    assert message(large_prompts(61, is_frozen=True), prompt).endswith(
        "at least 111, or data.max_pixels to at most 39200."
    )
    assert message(large_prompts(11, is_frozen=True), prompt).endswith("to at least 111.")


def test_a_trained_tower_leaves_the_prompt_to_be_counted_too():
    prompt = make_prompt("a", 300, (280, 280))
    assert "and one token of a completion have 401 tokens" in message(large_prompts(250), prompt)


def test_several_images_share_what_fits():
    prompt = make_prompt("a", 10, (280, 280), (280, 140))  # 300 tokens in the tower
    assert message(large_prompts(150), prompt).endswith("at least 300, or data.max_pixels to at most 29400.")


def test_a_long_text_is_named_without_a_limit_for_images():
    assert message(large_prompts(50), make_prompt("a", 60)) == (
        "rows, row 0: Sample a: its prompt and one token of a completion have 61 tokens, more than "
        "memory.micro_batch_tokens 50. A micro-batch cannot be smaller. Set memory.micro_batch_tokens to at least 61."
    )


def test_the_largest_is_described_and_others_are_named():
    prompts = [make_prompt(name, tokens) for name, tokens in [("a", 60), ("b", 5), ("c", 70), ("d", 50)]]
    found = message(large_prompts(50), *prompts)
    assert found.startswith("rows, row 2: Sample c") and "at least 71" in found
    assert found.endswith("Others exceed it as well: rows, row 0, rows, row 3.")


def test_under_auto_the_first_is_warned_of(caplog):
    found, prompt = large_prompts(50, is_set=False), make_prompt("a", 60)
    found.check({"rows, row 1": make_prompt("b", 5)})
    assert caplog.records == []
    found.check({"rows, row 3": prompt})
    found.check({"rows, row 4": prompt})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("rows, row 3: Sample a: its prompt and one token of a completion have 61 tokens")
    assert line.endswith("A micro-batch with such a prompt may not fit in memory.")


def test_frames_of_videos_are_named_with_their_own_setting():
    frames = np.zeros((4, 140, 280, 3), dtype=np.uint8)
    clip = Video(frames, (0, 1, 2, 3), 2.0, 4, 2.0)
    sample = Sample("v", [], [], {}, "", videos=[clip])
    prompt = Prompt(sample, torch.zeros(10 + 100, dtype=torch.long), {}, {})
    image = Image.new("RGB", (280, 280))
    assert message(large_prompts(60, min_pixels=None), prompt) == (
        "rows, row 0: Sample v: its videos of 4 frames of 280x140 pixels count as 200 tokens in the vision tower, more "
        "than memory.micro_batch_tokens 60. A micro-batch cannot be smaller. Set memory.micro_batch_tokens to at least "
        "200, or data.max_frames to at most 1, or data.video_max_pixels to at most 11760."
    )  # 60 of 200, and a frame has 39,200 pixels
    assert message(large_prompts(110, min_pixels=None), prompt).endswith(
        "at least 200, or data.max_frames to at most 2, or data.video_max_pixels to at most 21560."
    )
    for too_large in (None, 21561):  # the processor has one size, or frames of one token are larger
        found = message(large_prompts(110, min_frame=too_large), prompt)
        assert found.endswith("at least 200, or data.max_frames to at most 2.")
    both = replace(prompt, sample=replace(sample, images=[image]))
    found = message(large_prompts(60), both)
    assert "images of 280x280 pixels and videos of 4 frames of 280x140 pixels" in found
    assert found.endswith("to at least 400.")


def test_frames_that_are_images_are_named_as_frames():
    frames = np.zeros((4, 140, 280, 3), dtype=np.uint8)
    clips = [Video(frames, (0, 1, 2, 3), 2.0, 4, 2.0), Video(frames[:2], (0, 1), 2.0, 2, 1.0)]
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "video"}]}]
    sample = frames_as_images(Sample("v", messages, [], {}, "", videos=clips))
    prompt = Prompt(sample, torch.zeros(10 + 300, dtype=torch.long), {}, {})  # 6 frames of 100 tokens in the tower
    found = message(large_prompts(500), prompt)
    assert "its videos of 4 frames of 280x140, 2 frames of 280x140 pixels count as 600 tokens" in found
    # 5 of 6 frames fit: three and two
    assert found.endswith("at least 600, or data.max_frames to at most 3, or data.video_max_pixels to at most 32666.")
    assert message(large_prompts(500, min_frame=None), prompt).endswith("or data.max_frames to at most 3.")
