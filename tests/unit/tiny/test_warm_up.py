"""The warm-up teaches the form of an answer."""

import logging
import re
from itertools import islice
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.build import build_tiny
from rl_vlm.tiny.warm_up import random_answers, warm_up
from tests.helpers.tiny_run import ROWS

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
    warm_up(tmp_path, DataConfig(dataset_name=ROWS), random_answers(ANSWERS, 0), num_steps=1, num_images=100)
