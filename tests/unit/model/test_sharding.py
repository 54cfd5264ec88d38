"""What cannot be trained by ranks that shard the model."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rl_vlm.distributed.zero_config import check_zero
from rl_vlm.errors import ConfigError, LaunchError
from rl_vlm.model.sharding import refuse_unshardable, require_input_gradients
from tests.helpers.builders import make_policy
from tests.tiny.build import build_tiny


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_gradients_without_a_norm_are_refused() -> None:
    check_zero({"stage": 2, "compute_grad_norm": True})
    with pytest.raises(LaunchError, match=r"zero_optimization\.compute_grad_norm false is not supported"):
        check_zero({"stage": 2, "compute_grad_norm": False})


def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    checkpoint = build_tiny("qwen2_5_vl", tmp_path)
    refuse_unshardable(make_policy(checkpoint, use_peft=True), "zero3")
    on_head = make_policy(checkpoint, use_peft=True, lora_target_modules=["q_proj", "lm_head"])
    with pytest.raises(ConfigError, match=r"cannot be trained with zero3.* or train with ddp or zero2"):
        refuse_unshardable(on_head, "zero3")


@pytest.mark.parametrize("is_frozen", [True, False])
def test_input_gradients_are_for_trained_vision_towers(tmp_path: Path, is_frozen: bool) -> None:
    excluded = None if is_frozen else []
    policy = make_policy(build_tiny("qwen2_5_vl", tmp_path), use_peft=True, lora_exclude_modules=excluded)
    require_input_gradients(policy)
    embeddings = policy.transformer.get_input_embeddings()
    assert not embeddings.weight.requires_grad
    assert embeddings(torch.tensor([[1, 2]])).requires_grad != is_frozen
