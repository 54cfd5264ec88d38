"""Edited contexts: which images stay, what the model reads, and how often contexts are edited."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rl_vlm.data.images import decode_image
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.rollout.environments.context_policy import REMOVED, ContextPolicy
from rl_vlm.types import Completion, Observation
from tests.helpers.scripted import call, grey
from tests.helpers.templates import builder_of
from tests.unit.rollout.environments.test_driver import Game, Run, scripted, toolbox_of


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    return builder_of("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


def counted(builder: PromptBuilder, num_turns: int, keep: int, every: int, max_tokens: int = 40000) -> Run:
    """A trajectory that sees an image of one grey after each turn but the last: 1, 2, 3, …"""
    turns = [call("add", number=1)] * (num_turns - 1) + ["Done"]
    return Run(
        builder, scripted(*turns), max_tokens=max_tokens, max_turns=num_turns, context_policy=ContextPolicy(keep, every)
    )


def greys(observations: Sequence[Observation]) -> list[int]:
    """The greys of the images of observations."""
    files = [file for each in observations for file in each.images]
    return [decode_image(file).convert("L").getpixel((0, 0)) for file in files]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("num_turns", "keep", "every", "num_contexts"),
    [(10, 1, 1, 9), (20, 1, 1, 19), (20, 3, 1, 17), (20, 1, 5, 4), (20, 3, 5, 4), (5, 2, 5, 1), (6, 2, 5, 2)],
)
def test_contexts_are_counted(builder: PromptBuilder, num_turns: int, keep: int, every: int, num_contexts: int) -> None:
    """Counts by hand: a context is edited after `every` turns if it has more than `keep` images."""
    completion = counted(builder, num_turns, keep, every).completion
    assert len(completion.contexts) == num_contexts
    assert len(completion.turn_lengths) == num_turns and len(completion.turns) == num_turns


def test_older_images_become_a_text_and_newer_ones_stay(builder: PromptBuilder) -> None:
    run = counted(builder, 6, keep=2, every=3)
    first, second = run.completion.contexts
    assert greys(first.observations) == [1, 2] and greys(second.observations) == [2, 3, 4, 5]
    assert first.observations[1] is second.observations[3]  # the same object, whose features are computed once
    texts = [run.format.tokenizer.decode(each.token_ids) for each in second.observations]
    assert [REMOVED["image"] in text for text in texts] == [False, True, False, False, False, False, False, False]
    assert "count 1" in texts[1] and [len(turn.results[0].images) for turn in run.completion.turns[:-1]] == [1] * 5


def test_older_clips_become_a_text_and_a_clip_counts_once(builder: PromptBuilder) -> None:
    """The model takes videos. Each turn shows a clip, and the second one an image beside it."""

    class Film(Game):
        def add(self, number: int) -> list[dict[str, Any]]:
            """Show.

            Args:
                number: A number.
            """
            self.count += 1
            film = {"type": "video", "video": np.full((2, 8, 8, 3), self.count, np.uint8)}
            image = [{"type": "image", "image": grey(9)}] if self.count == 2 else []
            return [{"type": "text", "text": f"film {self.count}: "}, film, *image]

    turns = [call("add", number=1)] * 4 + ["Done"]
    run = Run(
        builder, scripted(*turns), toolbox_of(Film), max_turns=5, context_policy=ContextPolicy(2, 3), takes_videos=True
    )
    decode = run.format.tokenizer.decode
    seen = [[decode(each.token_ids) for each in context.observations] for context in run.completion.contexts]
    texts = [[text for text in some if "film" in text] for some in seen]
    assert [text.count("<|video_pad|>") for text in texts[0]] == [1, 1]
    first, second, third, fourth = texts[1]
    assert "film 1: [video removed]\n" in first
    assert "film 2: [video removed][image removed]\n" in second
    assert [text.count("<|video_pad|>") for text in (first, second, third, fourth)] == [0, 0, 1, 1]


def test_an_edited_context_is_the_rendered_conversation(builder: PromptBuilder) -> None:
    """Its tokens are those of one rendering, in which the first image is a text."""
    run = counted(builder, 4, keep=1, every=3)
    path = run.completion.paths[-1]
    turn, processor = call("add", number=1), builder.processor
    prompt = run.groups[0].prompt_of(0).sample

    def result(*content: dict[str, str]) -> list[dict[str, object]]:
        tags = [{"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>")]
        return [{"role": "assistant", "content": turn}, {"role": "user", "content": [tags[0], *content, tags[1]]}]

    def text(value: str) -> dict[str, str]:
        return {"type": "text", "text": value}

    messages = [
        *prompt.messages,
        *result(text("count 1"), text(REMOVED["image"])),
        *result(text("count 2"), text(REMOVED["image"])),
        *result(text("count 3"), {"type": "image"}),
    ]
    whole = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found = run.format.tokenizer.decode([*run.groups[0].prompt_of(0).token_ids, *path.token_ids])
    placeholder = "<|image_pad|>"
    while placeholder * 2 in found:
        found = found.replace(placeholder * 2, placeholder)
    _, rendered = whole.split("Start at 0.")
    _, seen = found.split("Start at 0.")
    assert seen == rendered + "Done<|im_end|>"


def test_the_limit_of_tokens_is_of_a_context(builder: PromptBuilder) -> None:
    """Without edits the same trajectory is too long."""
    longest = max(counted(builder, 8, 1, 2).completion.path_lengths)
    whole = counted(builder, 8, 7, 8).completion
    assert longest < whole.num_tokens
    assert counted(builder, 8, 1, 2, longest).completion.finish_reason == "stop"
    assert counted(builder, 8, 7, 8, longest).completion.finish_reason == "length"


def test_an_ended_completion_has_no_open_context(builder: PromptBuilder) -> None:
    """The observation after the edit does not fit, so no turn follows it."""
    lengths = counted(builder, 4, 1, 3).completion.path_lengths
    completion: Completion = counted(builder, 4, 1, 3, lengths[-1] - 8).completion
    assert completion.finish_reason == "length"
    assert (completion.pending, completion.edited, len(completion.contexts)) == (None, (), 1)
