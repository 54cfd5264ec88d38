"""States of groups: what comes back from a file is what was saved, with pixels that the processor makes again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rewards.contract import Fault
from rl_vlm.config.schema import DataConfig
from rl_vlm.data.images import decode_image
from rl_vlm.data.observations import ObservationRenderer
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.turns import TurnFormat
from rl_vlm.rollout.states import completion_from_state, completion_state, group_from_state, group_state
from rl_vlm.types import (
    Completion,
    Context,
    Group,
    Observation,
    Prompt,
    Sample,
    ToolCall,
    ToolResult,
    Turn,
    Video,
    VideoFormat,
)
from tests.helpers.builders import Rebuilder, noise_image, png, processor_of
from tests.tiny.build import build_tiny

TEXT: list[dict[str, Any]] = [{"type": "text", "text": "Look."}]
IMAGE: list[dict[str, Any]] = [{"type": "image"}]
FAMILIES = ["qwen2_5_vl", "internvl"]
"""Their processors make patches, and tiles."""


@pytest.fixture(params=FAMILIES)
def builder(request: Any, tmp_path: Path) -> PromptBuilder:
    return PromptBuilder(processor_of(build_tiny(request.param, tmp_path)), DataConfig())


def row_sample(columns: dict[str, Any] | None = None) -> Sample:
    messages = [{"role": "user", "content": IMAGE + TEXT}]
    return Sample("row", messages, [noise_image(40, 60, seed=1)], columns or {"answer": object()}, "Look.")


def made_sample(seed: int) -> Sample:
    """What a `reset` with an image makes of the row."""
    row = row_sample()
    messages = [{"role": "user", "content": IMAGE + TEXT + IMAGE}]
    new = noise_image(70, 50, seed=seed)
    return replace(row, messages=messages, images=[*row.images, new], encoded_images={1: png(new)},
                   prompt=f"start {seed}", image_files=["row.png", None])  # fmt: skip


def observed(builder: PromptBuilder, *seeds: int) -> Observation:
    """An observation with images of unlike sizes."""
    images = [noise_image(90 + 10 * seed, 64, seed=seed) for seed in seeds]
    renderer = ObservationRenderer(builder, [builder.processor.tokenizer.eos_token_id])
    message = {"role": "user", "content": IMAGE * len(images) + TEXT}
    return renderer.render("row, turn 1", [message], images, [png(image) for image in images], [1, 2])


def through_a_file(group: Group, row: Prompt, builder: PromptBuilder | None, path: Path) -> Group:
    """The group as a checkpoint gives it back. No code is read from the file."""
    torch.save(group_state(group), path / "group.pt")
    state = torch.load(path / "group.pt", weights_only=True)
    return group_from_state(state, row, Rebuilder(lambda draw: row, builder))


def completion(**fields: Any) -> Completion:
    return Completion(torch.tensor([1, 2, 3]), torch.zeros(3), "stop", "b", **fields)


def assert_equal(found: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_observations_come_back_bit_by_bit(builder: PromptBuilder, tmp_path: Path) -> None:
    row = builder.build(row_sample())
    two, text, next_one = observed(builder, 1, 2), observed(builder), observed(builder, 3)
    contexts = (Context((1, two, 1)), Context((two, text, 1)))
    group = Group("g", row, [completion(contexts=contexts, pending=next_one), completion()], 3)
    found = through_a_file(group, row, builder, tmp_path)
    assert found.prompt is row and found.completions[1].contexts == ()
    first = found.completions[0]
    once, again, words = first.observations
    assert once is again and once.name == "row, turn 1" and words.mm_inputs == {}
    assert first.pending is not None
    for ours, theirs in ((once, two), (words, text), (first.pending, next_one)):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert (ours.images, ours.unexpanded_ids) == (theirs.images, theirs.unexpanded_ids)
        assert_equal(ours.token_inputs, theirs.token_inputs)
        assert_equal(ours.mm_inputs, theirs.mm_inputs)


def test_a_state_holds_files_and_no_pixels(builder: PromptBuilder) -> None:
    group = Group("g", builder.build(row_sample()), [completion(contexts=(Context((1, observed(builder, 1), 2)),))], 3)
    (saved,) = group_state(group)["observations"]
    assert "mm_inputs" not in saved
    assert [decode_image(file).size for file in saved["images"]] == [(100, 64)]


def test_prompts_that_an_environment_made_come_back_with_the_columns_of_the_row(
    builder: PromptBuilder, tmp_path: Path
) -> None:
    row = builder.build(row_sample({"answer": "7"}))
    made, own = builder.build(made_sample(4)), builder.build(made_sample(5))
    group = Group("g", row, [completion(start=own), completion(start=own), completion(start=made)], 3)
    found = through_a_file(group, row, builder, tmp_path)
    assert found.prompt_of(0) is found.prompt_of(1) and found.prompt is row
    for ours, theirs in ((found.prompt_of(2), made), (found.prompt_of(0), own)):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert_equal(ours.token_inputs, theirs.token_inputs)
        assert_equal(ours.mm_inputs, theirs.mm_inputs)
        assert ours.sample.encoded_images == theirs.sample.encoded_images
        assert [image.tobytes() for image in ours.sample.images] == [i.tobytes() for i in theirs.sample.images]
        assert (ours.sample.columns, ours.sample.prompt) == ({"answer": "7"}, theirs.sample.prompt)
        assert ours.sample.image_files == ["row.png", None]


def test_turns_and_outcomes_come_back_without_the_environment(tmp_path: Path) -> None:
    prompt = Prompt(Sample("row", [], [], {}, ""), torch.tensor([1]), {}, {})
    result = ToolResult([{"type": "image"}], (b"png",), None, 0.5)
    turns = (
        Turn("<call>", "", (ToolCall("crop", {"box": [1, 2]}),), (result,)),
        Turn("<cal", "", (), (ToolResult([], (), "no JSON"),)),
        Turn("7", "7"),
    )
    saved = completion(turns=turns, fault=Fault("timeout", "crop: late"), environment_reward=0.5, environment=object())
    group = Group("g", prompt, [replace(saved, finish_reason="fault")], 3)
    (found,) = through_a_file(group, prompt, None, tmp_path).completions
    assert found.turns == turns
    assert (found.finish_reason, found.fault, found.environment_reward) == (
        "fault",
        Fault("timeout", "crop: late"),
        0.5,
    )
    assert found.environment is None


def test_a_group_of_an_older_checkpoint_has_no_trajectories() -> None:
    prompt = Prompt(Sample("row", [], [], {}, ""), torch.tensor([1]), {}, {})
    old = {
        "token_ids": torch.tensor([4, 5]),
        "generator_logprobs": torch.zeros(2),
        "finish_reason": "stop",
        "text": "a",
    }
    state = {"group_id": "g", "policy_version": 3, "completions": [old]}
    (found,) = group_from_state(state, prompt, Rebuilder(lambda draw: prompt)).completions
    assert found.token_ids.tolist() == [4, 5]
    assert (found.contexts, found.turns, found.pending, found.start, found.fault) == ((), (), None, None, None)


def test_a_fault_is_a_text_in_checkpoints() -> None:
    saved = completion(fault=Fault("timeout", "crop: late"))
    state = completion_state(saved, [], [])
    assert state["fault"] == "timeout: crop: late"
    assert completion_from_state(state, [], []).fault == saved.fault


def noise_clip(seed: int) -> Video:
    frames = np.random.default_rng(seed).integers(256, size=(4, 64, 64, 3), dtype=np.uint8)
    return Video(frames, (0, 1, 2, 3), 3.0, 4, 4 / 3)


@pytest.mark.parametrize("video_format", ["native", "frames"])
def test_clips_come_back_bit_by_bit(builder: PromptBuilder, video_format: VideoFormat, tmp_path: Path) -> None:
    """Those of observations and of own prompts from files, and those of the row from the row."""
    built = PromptBuilder(builder.processor, DataConfig(), video_format=video_format)
    stops = [builder.processor.tokenizer.eos_token_id]
    turns = TurnFormat.choose(built, stops, [], "auto", "auto", takes_images=True, takes_videos=True)
    of_row, shown = noise_clip(1), noise_clip(2)
    content = [{"type": "video"}, {"type": "text", "text": "Look."}]
    messages = [{"role": "user", "content": content}]
    row = built.build(Sample("row", messages, [], {}, messages, videos=[of_row]))
    result = ToolResult([{"type": "text", "text": "a"}, {"type": "video"}], (shown.encoded(),))
    seen = turns.observe("row, turn 1", [], (), [result], [[shown]])
    assert (seen.num_images, seen.num_videos) == ((0, 1) if video_format == "native" else (4, 0))
    own = built.build(turns.reset_sample(row.sample, content[:1], [shown], result.images))
    assert [video.digest for video in own.sample.all_videos] == [of_row.digest, shown.digest]
    group = Group("g", row, [completion(start=own, contexts=(Context((1, seen, 2)),))], 3)
    assert [each if isinstance(each, int) else "file" for name in ("videos", "frames_of")
            for each in group_state(group)["starts"][0][name]] == [0, "file"]  # fmt: skip
    (found,) = through_a_file(group, row, built, tmp_path).completions
    assert found.start is not None
    for ours, theirs in ((found.observations[0], seen), (found.start, own)):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert_equal(ours.mm_inputs, theirs.mm_inputs)
    assert found.start.sample.all_videos[0] is of_row
    assert found.start.sample.frame_starts == own.sample.frame_starts
    assert found.start.own_image_sizes == own.own_image_sizes
