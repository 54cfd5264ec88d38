"""Prompts with videos: rows of every family against the model's own forward, and rollouts against training rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rl_vlm.model.families import FAMILIES
from rl_vlm.model.family import rope_positions
from rl_vlm.model.policy import Policy
from rl_vlm.passes.proof import OTHER_IMAGES, OTHER_PROMPTS, OWN_FORWARD, ROLLOUTS
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.types import Forward, MicroBatch, RolloutRequest, Sampling, SubGroup, Video
from tests.helpers.builders import gradient_error, make_group, make_policy, noise_image, sharp_checkpoint, whole
from tests.helpers.cut_groups import cut, cut_gradients
from tests.helpers.family_parity import FP32_ROUNDING, Parity, in_fp64, scores, shares, stock_scores
from tests.helpers.given_groups import make_trainer
from tests.helpers.tiers import in_tiers
from tests.helpers.videos import (
    CASES,
    IMAGE,
    LONG,
    case_groups,
    fails,
    noise_video,
    own_logprobs,
    own_scores,
    video_prompt,
)
from tests.tiny.build import TINY_FAMILIES

NATIVE = [*(name for name, family in FAMILIES.items() if family.videos), "gemma4_bidirectional"]
GRIDS = [
    name for name, family in FAMILIES.items() if family.videos == "patches" and "visual" in family.vision_modules[0]
]
WITH_ROPE_INDEX = [name for name in GRIDS if FAMILIES[name].has_rope_index]
OTHERS = [name for name in TINY_FAMILIES if name not in NATIVE]
CI = {"qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_5", "internvl", "llava", "gemma3"}
"""Positions by seconds, deepstack features, placeholders of images, states, videos as images; frames as images."""
MISPLACED = {"qwen2_vl", "qwen2_5_vl"}
"""Families whose text after a video is placed by a rule that is not transformers'."""
WITHOUT_TIMES = {
    "qwen2_vl", "internvl", "minicpmv4_6", "minicpmv4_7", "perception_lm", "llava_onevision", "exaone4_5",
}  # fmt: skip
"""Neither the text of their prompts nor their positions have times."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        families = FAMILIES_OF.get(metafunc.function, NATIVE)
        metafunc.parametrize("family", in_tiers(families, (), CI), scope="module")


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return make_policy(checkpoint)


@pytest.mark.parametrize("case", CASES)
def test_shared_rows_are_those_of_the_models_own_forward(
    policy: Policy, checkpoint: Path, family: str, case: str
) -> None:
    groups = case_groups(checkpoint, case)
    dense = scores(policy, groups, shared=False)
    shared = scores(policy, groups, shares(policy))
    for parity in (Parity.of(shared, dense), Parity.of(dense, own_scores(policy, groups))):
        assert parity.logprobs <= 1e-5
        assert parity.gradients <= FP32_ROUNDING.get(family, 1e-5)


def test_rows_are_exact_in_fp64(checkpoint: Path) -> None:
    policy = make_policy(checkpoint)
    with in_fp64(policy):
        for case in CASES:
            groups = case_groups(checkpoint, case, torch.float64)
            expected = own_scores(policy, groups)
            assert Parity.of(scores(policy, groups, shares(policy)), expected).worst <= 1e-9
            assert Parity.of(scores(policy, groups, shared=False), expected).worst <= 1e-9


@pytest.mark.parametrize("settings", [
    {"freeze_vision_tower": True, "gradient_checkpointing": True},
    {"gradient_checkpointing": True},
    {"use_peft": True, "lora_r": 4, "gradient_checkpointing": True},
])  # fmt: skip
def test_shared_equals_dense_for_each_way_to_train(checkpoint: Path, settings: dict[str, Any]) -> None:
    """Of groups that are cut into micro-batches too."""
    policy = make_policy(checkpoint, **settings)
    with in_fp64(policy):
        groups = case_groups(checkpoint, "packed prompts", torch.float64)
        expected = scores(policy, groups, shared=False)
        assert Parity.of(scores(policy, groups, shares(policy)), expected).worst <= 1e-9
        batches = cut(policy, groups)
        assert len(batches) > len(groups)
        assert gradient_error(cut_gradients(policy, groups, batches), expected.gradients) <= 1e-9


@torch.no_grad()
def test_what_must_not_happen_would_show(policy: Policy, checkpoint: Path, family: str) -> None:
    def logprobs(*videos: Video) -> torch.Tensor:
        group = make_group(video_prompt(checkpoint, videos), [5, 1, 9, 3])
        return policy(Forward(whole([group], shares(policy)))).logprobs_NT

    first, second = noise_video(8, seed=1), noise_video(8, seed=2)
    reversed_frames = replace(first, frames=first.frames[::-1].copy())
    slow = noise_video(8, seed=1, fps=0.5)
    found = logprobs(first)
    assert (logprobs(reversed_frames) - found).abs().max() >= 0.01
    assert (logprobs(second, first) - logprobs(first, second)).abs().max() >= 0.01
    if family not in WITHOUT_TIMES:
        assert (logprobs(slow) - found).abs().max() >= 0.01


@torch.no_grad()
def test_text_after_a_long_video_is_not_where_transformers_puts_it(
    policy: Policy, checkpoint: Path, family: str
) -> None:
    prompt = video_prompt(checkpoint, LONG)
    row = {"input_ids": prompt.token_ids, **prompt.token_inputs}
    transformers_positions = rope_positions(policy.transformer, row, [prompt.mm_inputs])
    (group,) = case_groups(checkpoint, "long in time")
    token_ids = group.group.completions[0].token_ids
    ours, theirs = (own_logprobs(policy, prompt, token_ids, p) for p in (None, transformers_positions))
    assert ((ours - theirs).abs().max() >= 0.01) == (family in MISPLACED)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_the_models_own_forward_chooses_our_positions(policy: Policy, checkpoint: Path, case: str) -> None:
    """It does so except after videos of the misplaced families, where the proof of a run gives it ours."""
    if any(fails(policy.transformer, group.group.prompt) for group in case_groups(checkpoint, case)):
        pytest.skip("the model's own forward does not take the prompt")
    for group in case_groups(checkpoint, case):
        dense = policy(Forward(whole([group], shared=False))).logprobs_NT
        for i in range(len(group.group.completions)):
            own = MicroBatch([SubGroup(group, [i])], shared=False, own_forward=True)
            inner: Any = policy.transformer.base_model
            inner.rope_deltas = None
            found = policy(Forward(own)).logprobs_NT[0]
            torch.testing.assert_close(found, dense[i, : len(found)], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_frames", "fps", "of_video", "after"), [
    (16, 2.0, [1, 5, 9, 13, 17, 21, 25, 29], 30),  # 4 positions a second, and the grid is 4 wide
    (4, 2.0, [1, 5], 6),
    (4, 8.0, [1, 2], 5),  # the grid is wider than the time is long
])  # fmt: skip
def test_text_after_a_video_starts_behind_its_largest_position(
    tmp_path: Path, num_frames: int, fps: float, of_video: list[int], after: int
) -> None:
    """The values are those of vLLM 0.32 and of the authors' code."""
    policy = make_policy(sharp_checkpoint("qwen2_5_vl", tmp_path))
    prompt = video_prompt(tmp_path, [noise_video(num_frames, seed=1, size=(32, 32), fps=fps)])
    positions = policy.family.prompt_positions(policy.transformer, prompt)
    types = prompt.token_inputs["mm_token_type_ids"]
    start = int((types == 2).nonzero()[0])
    end = int((types == 2).nonzero()[-1]) + 1
    assert [t - start + 1 for t in positions[0, start:end].unique().tolist()] == of_video
    num_after = len(types) - end
    assert (positions[:, end:] - start + 1).tolist() == [list(range(after, after + num_after))] * 3


@torch.no_grad()
def test_images_and_videos_of_all_prompts_cost_one_run_of_the_tower(checkpoint: Path) -> None:
    policy = make_policy(checkpoint, freeze_vision_tower=True)
    groups = case_groups(checkpoint, "packed prompts")
    batch = whole(groups, shares(policy))
    policy(Forward(batch))
    policy(Forward(batch))
    assert policy.counters["vision_forwards"] == 1
    image, first, second = 6 * 8, 2 * 6 * 8, 3 * 6 * 8  # patches of 4 x 4 pixels, and two frames are one patch
    assert policy.counters["vision_patches"] == first + image + image + second
    assert [policy.vision.pixels(group.group.prompt) for group in groups] == [2304, 768, 2304]


@torch.no_grad()
def test_equal_media_in_another_order_are_told_apart(policy: Policy, checkpoint: Path) -> None:
    """Their inputs are equal, and so they share features."""
    video = noise_video(4, seed=1)
    prompts = [video_prompt(checkpoint, media) for media in ([IMAGE, video], [video, IMAGE])]
    assert prompts[0].digest == prompts[1].digest
    groups = [make_group(prompt, [5, 3], seed=i) for i, prompt in enumerate(prompts)]
    together = policy(Forward(whole(groups, shares(policy)))).logprobs_NT
    alone = [own_logprobs(policy, g.group.prompt, c.token_ids) for g in groups for c in g.group.completions]
    for row, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=1e-5)


def test_rollouts_have_the_log_probs_of_training_rows(policy: Policy, checkpoint: Path) -> None:
    engine = HFEngine.for_policy(policy, AutoTokenizer.from_pretrained(checkpoint), max_num_seqs=64)
    media = [LONG, [IMAGE, noise_video(5, seed=4)], [noise_image(48, 16, seed=2)]]
    requests = [RolloutRequest(str(i), video_prompt(checkpoint, some)) for i, some in enumerate(media)]
    sampling = Sampling(num_generations=3, max_completion_length=8, temperature=1.0, seed=0)
    banned = policy.family.banned_token_ids(policy.transformer.config)
    for group in engine.generate(requests, sampling):
        for completion in group.completions:
            with torch.no_grad():
                expected = own_logprobs(policy, group.prompt, completion.token_ids, banned=banned)
            torch.testing.assert_close(completion.generator_logprobs, expected, rtol=0, atol=1e-5)


def test_frames_are_images_for_other_families(policy: Policy, checkpoint: Path, family: str) -> None:
    """Of two prompts in a row, and of one if the family has one in a row."""
    media = [[noise_video(4, seed=1), IMAGE], [noise_video(6, seed=2)]][: 1 if family == "mllama" else 2]
    prompts = [video_prompt(checkpoint, some, video_format="frames") for some in media]
    assert [prompt.num_images for prompt in prompts] == [5, 6][: len(prompts)]
    groups = [make_group(prompt, [5, 1, 3], seed=i) for i, prompt in enumerate(prompts)]
    expected = stock_scores(policy, groups)
    for shared in {shares(policy), False}:
        parity = Parity.of(scores(policy, groups, shared), expected)
        assert parity.logprobs <= 1e-5
        assert parity.gradients <= FP32_ROUNDING.get(family, 1e-5)


@pytest.mark.parametrize("case", ["long in time", "image and video"])
def test_a_run_proves_rows_with_videos(policy: Policy, checkpoint: Path, case: str) -> None:
    groups = case_groups(checkpoint, case)
    proof = make_trainer(policy, groups).start_check.run(groups)
    untried = {check.of for check in proof.checks if check.untried}
    left_out = {OWN_FORWARD, OTHER_IMAGES} if fails(policy.transformer, groups[0].group.prompt) else set()
    assert untried == {OTHER_PROMPTS, ROLLOUTS} | left_out  # one prompt, which was not sampled
    assert all(check.holds for check in proof.checks)


FAMILIES_OF = {
    test_text_after_a_long_video_is_not_where_transformers_puts_it: WITH_ROPE_INDEX,
    test_images_and_videos_of_all_prompts_cost_one_run_of_the_tower: GRIDS,
    test_equal_media_in_another_order_are_told_apart: GRIDS,
    test_frames_are_images_for_other_families: OTHERS,
}
"""The families of a test, if it is not for all with videos of their own."""
