"""Prompts of CogVLM, whose tokens a function of the checkpoint's model makes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.types import Sample
from tests.helpers.remote_code.build import build_remote
from tests.unit.data.remote.test_processors import SQUARE, WIDE, builder_of, sample_of, settings

START, IMAGE = "<|begin_of_text|>", "<|reserved_special_token_0|>"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_remote("cogvlm", tmp_path_factory.mktemp("cogvlm") / "cogvlm")


def conversation(*turns: tuple[str, str], images: tuple[Image.Image, ...] = ()) -> Sample:
    """Messages of (role, text). The images come before the first text."""
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns
    ]
    messages[0]["content"] = [*({"type": "image"} for _ in images), *messages[0]["content"]]
    return Sample("s", messages, list(images), {}, messages)


def decoded(builder: PromptBuilder, sample: Sample) -> str:
    return builder.processor.tokenizer.decode(builder.build(sample).token_ids)


def test_the_image_comes_before_the_text(checkpoint: Path) -> None:
    builder = builder_of(checkpoint)
    for image in (SQUARE, WIDE):  # of any size, 4 x 4 patches, halved in both directions, with a start and an end
        sample = sample_of("Which digit?", image)
        assert decoded(builder, sample) == START + IMAGE * 6 + "Question: Which digit? Answer:"
        assert builder.text(sample) == "Question: Which digit? Answer:"
        prompt = builder.build(sample)
        types = prompt.token_inputs["token_type_ids"].tolist()
        assert types[:8] == [0, 1, 1, 1, 1, 1, 1, 0] and sum(types) == 6 and len(types) == len(prompt.token_ids)
        assert prompt.mm_inputs.keys() == {"pixel_values"}
        assert prompt.mm_inputs["pixel_values"].shape == (1, 3, 16, 16)
        assert builder.media_inputs([image])["pixel_values"].equal(prompt.mm_inputs["pixel_values"])


def test_prompts_without_an_image_have_no_tokens_of_one(checkpoint: Path) -> None:
    builder = builder_of(checkpoint)
    prompt = builder.build(sample_of("Which digit?"))
    assert decoded(builder, prompt.sample) == START + "Question: Which digit? Answer:"
    assert not prompt.mm_inputs and not prompt.token_inputs["token_type_ids"].any()


def test_earlier_turns_are_the_history(checkpoint: Path) -> None:
    turns = ("user", "One?"), ("assistant", "1"), ("user", "Two?")
    assert decoded(builder_of(checkpoint), conversation(*turns, images=(SQUARE,))) == (
        START + IMAGE * 6 + "Question: One? Answer: 1\nQuestion: Two? Answer:"
    )


def test_the_template_can_be_chosen(checkpoint: Path) -> None:
    data = DataConfig(chat_template_kwargs={"template_version": "vqa"})
    builder = PromptBuilder(load_processor(str(checkpoint), settings(checkpoint), data), data)
    assert decoded(builder, sample_of("Which?")) == START + "Question: Which? Short answer:"
    with pytest.raises(ConfigError, match="the checkpoint's chat template has no enable_thinking"):
        PromptBuilder(builder.processor, DataConfig(chat_template_kwargs={"enable_thinking": True}))


def test_parts_of_a_conversation_have_no_first_token(checkpoint: Path) -> None:
    builder = builder_of(checkpoint)
    token_ids, token_inputs, mm_inputs = builder.part("Two?", ())
    assert builder.processor.tokenizer.decode(token_ids) == "Two?"
    assert token_inputs["token_type_ids"].tolist() == [0] * len(token_ids) and not mm_inputs


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (sample_of("?", SQUARE, WIDE), "CogVLM's code takes one image per prompt, and this one has 2"),
        (conversation(("system", "Be brief."), ("user", "?")), "and these messages are of system, user"),
        (
            conversation(("user", "?"), ("assistant", "So")),
            "with a question last, and these messages are of user, assi",
        ),
        (sample_of(f"What is {IMAGE}?", SQUARE), re.escape(IMAGE)),
    ],
)
def test_prompts_that_the_code_cannot_build_are_refused(checkpoint: Path, sample: Sample, reason: str) -> None:
    with pytest.raises(DataError, match=reason.replace("|", r"\|")):
        builder_of(checkpoint).build(sample)


def test_the_code_chooses_the_size_of_images(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_pixels"):
        load_processor(str(checkpoint), settings(checkpoint), DataConfig(max_pixels=400))


def test_the_processor_is_written_and_read_again(checkpoint: Path, tmp_path: Path) -> None:
    """In an adapter's directory, which has no config of a model."""
    builder, sample = builder_of(checkpoint), sample_of("Which digit?", WIDE)
    builder.processor.save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{checkpoint}"}}')
    assert builder_of(tmp_path).build(sample).token_ids.tolist() == builder.build(sample).token_ids.tolist()
