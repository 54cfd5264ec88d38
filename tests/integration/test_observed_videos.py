"""Clips that environments show: rows of trajectories against the model's own forward over the whole conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer

from rl_vlm.data.prompts import by_kind, kind_of
from rl_vlm.model.policy import Policy
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.run.run import train
from rl_vlm.types import (
    Context,
    Forward,
    Group,
    Observation,
    Prompt,
    RolloutRequest,
    Sample,
    Sampling,
    Video,
)
from tests.helpers import tiny_run
from tests.helpers.builders import (
    make_policy,
    make_trajectories,
    png,
    processor_of,
    sharp_checkpoint,
    take_gradients,
    whole,
)
from tests.helpers.calling import BRIGHTNESS, FILMS, calling_checkpoint
from tests.helpers.family_parity import (
    FP32_ROUNDING,
    Parity,
    Scores,
    in_fp64,
    observed_text,
    scores,
    shares,
    weighted_sum,
)
from tests.helpers.resuming import assert_same_run, resumed, train_until
from tests.helpers.tiers import in_tiers
from tests.helpers.videos import EQUAL_LENGTHS, IMAGE, noise_video, own_logprobs, video_prompt
from tests.integration.test_videos import CI as CI_OF_VIDEOS
from tests.integration.test_videos import NATIVE, WITHOUT_TIMES

CI = CI_OF_VIDEOS.intersection(NATIVE)
ROUNDING = FP32_ROUNDING | {"qwen4_exp": 2e-5}
"""Where rounding in fp32 moves gradients by more than 1e-5. Qwen4-Exp's are 1.01e-5 apart here, and 1e-9 in fp64."""
ONE_LENGTH = {"llava_onevision", "perception_lm"}
"""Families whose inputs of several clips can be joined only if they have equally many frames."""

Media = Sequence[Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", in_tiers(NATIVE, (), CI), scope="module")


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return make_policy(checkpoint)


def shown(checkpoint: Path, media: Media, text: str = "Look.") -> Observation:
    """An observation with the tokens of a prompt of its own."""
    prompt = video_prompt(checkpoint, media, text)
    files = tuple(each.encoded() if isinstance(each, Video) else png(each) for each in media)
    return Observation(text, prompt.token_ids, prompt.token_inputs, prompt.mm_inputs, files)


class Trial:
    """Groups of trajectories in which clips are shown, and the images and clips of each observation."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        self.checkpoint, self.media = checkpoint, {}
        first = noise_video(4, seed=1)
        slow, long = noise_video(4, seed=1, fps=0.5), noise_video(6, seed=2)
        if any(name in checkpoint.name for name in ONE_LENGTH):
            long = noise_video(4, seed=2)
        fast_clip, slow_clip, long_clip = (self.shown([each]) for each in (first, slow, long))
        both = self.shown([IMAGE, noise_video(4, seed=3)])
        text = observed_text(6, seed=7)
        on_image = [
            [Context((5,))], [Context((3, fast_clip, 4))], [Context((3, slow_clip, 4))],
            [Context((4, text, 1, long_clip, 2))],
            [Context((2, fast_clip, 3)), Context((observed_text(4, seed=9), fast_clip, text, 2))],
        ]  # fmt: skip
        on_video = [[Context((1, long_clip, 3, both, 2))], [Context((4,))], [Context((2, text, 3))]]
        prompts = [self.prompt([IMAGE]), self.prompt([noise_video(4, seed=4)])]
        pairs = zip(prompts, (on_image, on_video), strict=True)
        self.groups = [make_trajectories(*pair, seed) for seed, pair in enumerate(pairs)]
        for each in self.media:
            for name, value in each.mm_inputs.items():
                each.mm_inputs[name] = value.to(dtype) if value.is_floating_point() else value

    def shown(self, media: Media) -> Observation:
        observation = shown(self.checkpoint, media)
        self.media[observation] = media
        return observation

    def prompt(self, media: Media) -> Prompt:
        prompt = video_prompt(self.checkpoint, media)
        self.media[prompt] = media
        return prompt

    def conversation(self, prompt: Prompt, parts: Sequence[Tensor | Observation], dtype: torch.dtype) -> Prompt:
        """A prompt of all that a turn follows."""
        owners = [prompt, *(part for part in parts if isinstance(part, Observation) and part.mm_inputs)]
        media = [each for owner in owners for each in self.media[owner]]
        names = dict.fromkeys(name for owner in owners for name in owner.token_inputs)
        rows = {"input_ids": prompt.token_ids} | {name: prompt.token_inputs[name] for name in names}
        for part in parts:
            ids, given = (part, {}) if isinstance(part, Tensor) else (part.token_ids, part.token_inputs)
            rows = {
                name: torch.cat([row, ids if name == "input_ids" else given.get(name, torch.zeros_like(ids))])
                for name, row in rows.items()
            }
        inputs = self.inputs_together(owners)
        inputs = {name: v.to(dtype) if v.is_floating_point() else v for name, v in inputs.items()}
        content = [{"type": kind_of(each)} for each in media]
        images, videos = by_kind(media)
        sample = Sample("whole", [{"role": "user", "content": content}], images, {}, "", videos=videos)
        return Prompt(sample, rows.pop("input_ids"), rows, inputs)

    def inputs_together(self, owners: Sequence[Prompt | Observation]) -> dict[str, Tensor]:
        """The inputs of all images and videos, as the processor makes them in one call if it takes clips of unlike
        lengths.
        """
        if type(processor_of(self.checkpoint)).__name__ not in EQUAL_LENGTHS:
            return video_prompt(self.checkpoint, [each for owner in owners for each in self.media[owner]]).mm_inputs
        names = dict.fromkeys(name for owner in owners for name in owner.mm_inputs)
        dims = {"pixel_values": -1, "pixel_values_videos": -1} if "target_sizes_videos" in names else {}
        return {
            name: torch.cat([o.mm_inputs[name] for o in owners if name in o.mm_inputs], dim=dims.get(name, 0))
            for name in names
        }

    def own_logprobs(self, policy: Policy, group: Group, banned: Sequence[int] = ()) -> Tensor:
        """Of all sampled tokens, by the model's own forward over all that each turn follows."""
        dtype, found = policy.compute_dtype, []
        for completion in group.completions:
            for path, context in zip(completion.paths, completion.contexts, strict=True):
                parts: list[Tensor | Observation] = []
                start = 0
                for part in context.parts:
                    end = start + (part if isinstance(part, int) else len(part.token_ids))
                    if isinstance(part, int):
                        turn = path.token_ids[start:end]
                        before = self.conversation(group.prompt, parts, dtype)
                        found.append(own_logprobs(policy, before, turn, banned=banned))
                        parts.append(turn)
                    else:
                        parts.append(part)
                    start = end
        return torch.cat(found)

    def own_scores(self, policy: Policy) -> Scores:
        logprobs = torch.cat([self.own_logprobs(policy, scored.group) for scored in self.groups])
        weighted_sum(logprobs).backward()
        return Scores(logprobs.detach(), take_gradients(policy))


def test_shared_rows_are_those_of_the_models_own_forward(policy: Policy, checkpoint: Path, family: str) -> None:
    trial = Trial(checkpoint)
    dense = scores(policy, trial.groups, shared=False)
    shared = scores(policy, trial.groups, shares(policy))
    for parity in (Parity.of(shared, dense), Parity.of(dense, trial.own_scores(policy))):
        assert parity.logprobs <= 1e-5
        assert parity.gradients <= ROUNDING.get(family, 1e-5)


def test_rows_are_exact_in_fp64(checkpoint: Path) -> None:
    policy = make_policy(checkpoint)
    with in_fp64(policy):
        trial = Trial(checkpoint, torch.float64)
        expected = trial.own_scores(policy)
        for shared in {shares(policy), False}:
            assert Parity.of(scores(policy, trial.groups, shared), expected).worst <= 1e-9


@torch.no_grad()
def test_other_frames_and_other_times_show(policy: Policy, checkpoint: Path, family: str) -> None:
    """Each in its own completion alone. Of a tiny Gemma 4 they change log-probs by 0.0025 and more."""
    prompt, clip = video_prompt(checkpoint, [IMAGE]), noise_video(8, seed=1)
    backwards = replace(clip, frames=clip.frames[::-1].copy())

    def logprobs(first: Video, second: Video) -> Tensor:
        seen = [shown(checkpoint, [each]) for each in (first, second)]
        group = make_trajectories(prompt, [[Context((2, each, 4))] for each in seen])
        return policy(Forward(whole([group], shares(policy)))).logprobs_NT

    expected = logprobs(clip, clip)
    others = [backwards] if family in WITHOUT_TIMES else [backwards, noise_video(8, seed=1, fps=0.5)]
    for other in others:
        for row, found in enumerate((logprobs(other, clip), logprobs(clip, other))):
            moved = (found - expected).abs().amax(dim=1)
            assert moved[row] >= 1e-3 and moved[1 - row] <= 1e-6


def test_what_the_engine_samples_is_what_rows_compute(policy: Policy, checkpoint: Path) -> None:
    trial = Trial(checkpoint)
    engine = HFEngine.for_policy(policy, AutoTokenizer.from_pretrained(checkpoint), max_num_seqs=8)
    banned = policy.family.banned_token_ids(policy.transformer.config)
    sampling = Sampling(num_generations=5, max_completion_length=2000, temperature=1.0, seed=0, max_rollout_tokens=6)
    scored = trial.groups[0]
    (group,) = engine.generate([RolloutRequest("0", scored.group.prompt)], sampling)
    seen = [each for each in trial.media if isinstance(each, Observation)]
    for turn in range(2):  # further turns, after one clip and then another
        waiting = [replace(each, finish_reason="paused") for each in group.completions]
        waiting = [replace(each, pending=seen[(i + turn) % 4]) for i, each in enumerate(waiting)]
        group = replace(group, completions=waiting)
        (group,) = engine.generate([RolloutRequest("0", group.prompt, group)], sampling)
    assert all(len(completion.observations) == 2 for completion in group.completions)
    expected = trial.own_logprobs(policy, group, banned)
    found = torch.cat([completion.generator_logprobs for completion in group.completions])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_killed_run_goes_on_within_a_window_of_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The straight run has its environments in this process, and the killed one in processes of their own."""
    checkpoint = calling_checkpoint(tmp_path / "model")
    settings: dict[str, Any] = {
        "environment": FILMS, "reward_funcs": [BRIGHTNESS], "num_generations": 6, "max_completion_length": 260,
        "max_turns": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 3,
        "keep_images": 2, "edit_every": 1, "report": True, "max_environments": 3,
    }  # fmt: skip
    straight = tiny_run.make_config(checkpoint, tmp_path / "straight", **settings)
    killed = tiny_run.make_config(checkpoint, tmp_path / "killed", **settings, environment_isolation="process")
    train(straight)
    train_until(2, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "killed", tmp_path / "straight", last=3)
    rows = [row for rows in tiny_run.completions(tmp_path / "straight").values() for row in rows]
    results = [result for row in rows for turn in json.loads(row["turns"]) for result in turn["results"]]
    shown = [result for result in results if result["images"]]
    assert len(shown) > 5 and all(result["videos"] == result["images"] == 1 for result in shown)
    kept = [tmp_path / "straight" / "completions" / path for result in shown for path in result.get("kept", [])]
    assert len({Image.open(path).size for path in kept}) == 2  # a strip of four frames, and an image
    assert {len(row["video_frame_times"]) for row in rows} == {2} and all(len(row["videos"]) == 2 for row in rows)
    rewards = {round(255 * row["brightness"], 3) for row in rows}
    assert {0, 55, 215} <= rewards <= {0, 55, 215, 135, 108.333, 161.667}  # of up to three clips
