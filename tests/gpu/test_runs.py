"""Whole runs on one GPU."""

import shutil
from pathlib import Path

import pytest
import torch

from rl_vlm.run import train
from tests.helpers.resuming import NUM_STEPS, VARIANTS, assert_same_run, resumed
from tests.helpers.tiny_run import build_checkpoint, make_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KEPT = 2
"""Step of the last checkpoint that a resumed run finds."""


@pytest.mark.parametrize("variant", ["full", "lora_with_reference", "bfloat16", "window"])
def test_a_resumed_run_is_bitwise_the_same(variant: str, tmp_path: Path) -> None:
    checkpoint = build_checkpoint(tmp_path / "model")
    straight, copy = tmp_path / "straight", tmp_path / "copy"
    settings = VARIANTS[variant] | {"micro_batch_tokens": 150, "max_steps": NUM_STEPS}
    train(make_config(checkpoint, straight, **settings))
    shutil.copytree(straight, copy)
    for step in range(KEPT + 1, NUM_STEPS + 1):
        shutil.rmtree(copy / f"checkpoint-{step}")
    train(resumed(make_config(checkpoint, copy, **settings)))
    assert_same_run(copy, straight)
