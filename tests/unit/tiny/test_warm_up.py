"""The warm-up teaches the form of an answer."""

import logging
import re
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rl_vlm.config.schema import DataConfig, ModelConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.data.turns import TurnFormat
from rl_vlm.tiny.build import build_tiny
from rl_vlm.tiny.families import TINY_FAMILIES
from rl_vlm.tiny.warm_up import completion_of, random_answers, warm_up
from tests.helpers.tiny_run import NUM_ROWS, ROWS

ANSWERS = ["<answer>yes</answer>", "<answer>no</answer>"]


def test_random_answers_are_those_of_the_seed_and_all_occur():
    first, again, other = (list(islice(random_answers(ANSWERS, seed), 40)) for seed in (0, 0, 1))
    assert first == again != other
    assert set(first) == set(ANSWERS)


def test_the_loss_of_random_answers_falls_to_their_entropy(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Two equally likely answers have an entropy of ln 2 = 0.69, which no model can go below."""
    build_tiny("qwen2_5_vl", tmp_path, hidden_size=48, whole_tokens=("<answer>", "</answer>"), initializer_range=0.1)
    before = load_file(tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO, "rl_vlm"):
        data, answers = DataConfig(dataset_name=ROWS), random_answers(ANSWERS, 0)
        warm_up(tmp_path, data, answers, num_steps=24, num_images=8, learning_rate=5e-3)
    lines = [re.fullmatch(r"warm-up: step (\d+) of 24, loss (.*) per answer", line) for line in caplog.messages]
    losses = {int(line[1]): float(line[2]) for line in lines if line}
    assert list(losses) == [6, 12, 18, 24]
    assert losses[24] < 1.2 < losses[6]
    after = load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


def test_fewer_rows_than_images_are_enough(tmp_path: Path):
    build_tiny("qwen2_5_vl", tmp_path, hidden_size=48)
    answers = iter(ANSWERS * 50)
    warm_up(tmp_path, DataConfig(dataset_name=ROWS), answers, num_steps=2, num_images=100)
    assert len(list(answers)) == 100 - 2 * NUM_ROWS


def test_a_trajectory_has_the_turns_and_what_the_tool_shows(tmp_path: Path):
    """The turn with a call ends with the token of its closing tag; the last turn ends with EOS."""
    opening, closing = '<tool_call>{"name": "look", "arguments": ', "{}}</tool_call>"
    look = opening + closing
    build_tiny("qwen2_5_vl", tmp_path, hidden_size=48, whole_tokens=("<answer>", "</answer>", opening, closing))
    config = ModelConfig(model_name_or_path=str(tmp_path))
    builder = PromptBuilder(load_processor(str(tmp_path), config, DataConfig()), DataConfig())
    schema = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
    end, image = builder.processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|image_pad|>"])
    form = TurnFormat.choose(builder, [end], [schema], "auto", "auto", takes_images=True)
    completion = completion_of([look, Image.new("RGB", (16, 16)), "<answer>7</answer>"], form)
    (path,), (observation,) = completion.paths, completion.observations
    tokens = form.tokenizer
    assert tokens.decode(path.token_ids[path.sampled]) == f"{look}<answer>7</answer><|im_end|>"
    assert path.sampled.tolist() == [*[True] * 2, *[False] * len(observation.token_ids), *[True] * 4]
    assert int((path.token_ids == image).sum()) == 4
    assert tokens.decode(path.token_ids[2:4]) == "<|im_end|>\n"
    assert completion_of("<answer>7</answer>", form).token_ids.tolist() == [
        *tokens.convert_tokens_to_ids(["<answer>", "7", "</answer>"]), end,
    ]  # fmt: skip


PAGE = (Path(__file__).parents[3] / "docs/warming_up.md").read_text()


def test_the_function_on_the_page_makes_a_model(tmp_path: Path):
    names: dict[str, Any] = {}
    exec(PAGE.partition("```python\n")[2].partition("```")[0], names)
    names |= {"load_config": Mock(), "warm_up": (warmed := Mock())}
    names["starting_model"].__wrapped__(tmp_path, 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer.encode("<answer>cat</answer>")) == 3
    assert next(warmed.call_args[0][2]) in ("<answer>cat</answer>", "<answer>dog</answer>")


def test_the_page_names_the_families_with_any_resolution():
    assert [name for name, family in TINY_FAMILIES.items() if family.is_resizable and f"`{name}`" not in PAGE] == []
