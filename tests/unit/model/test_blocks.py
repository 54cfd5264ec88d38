"""Weights by the names and layouts of checkpoints."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from rl_vlm.model.blocks import as_in_checkpoints
from tests.helpers.tiny_run import weights
from tests.tiny.build import build_tiny


def test_experts_that_deepspeed_shards_keep_the_layout_of_their_checkpoint(tmp_path: Path) -> None:
    """Its parameters are empty between forwards. One matrix of experts is square: its shape tells nothing."""
    checkpoint = build_tiny("qwen3_vl_moe", tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    whole: dict[str, Any] = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _, parameter in model.named_parameters():
        sharded: Any = parameter
        sharded.ds_shape = parameter.shape
        sharded.data = torch.empty(0)
    found, expected = as_in_checkpoints(model, whole), weights(checkpoint)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any("experts.down_proj" in name for name in found)
