"""What cannot be trained by ranks that shard the model."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rl_vlm.config.schema import ModelConfig
from rl_vlm.distributed.zero_config import check_zero
from rl_vlm.errors import ConfigError, LaunchError
from rl_vlm.model.sharding import refuse_initialisation, refuse_unshardable, require_input_gradients
from tests.helpers.builders import make_policy
from tests.tiny.build import build_tiny


@pytest.mark.parametrize("initialisation", ["pissa", "olora"])
def test_adapters_made_of_base_weights_are_refused(initialisation: str) -> None:
    config = ModelConfig.model_validate(
        {"model_name_or_path": "m", "use_peft": True, "init_lora_weights": initialisation}
    )
    with pytest.raises(ConfigError, match=rf"model.init_lora_weights: {initialisation} .* with FSDP2 only one process"):
        refuse_initialisation(config, "FSDP2")


@pytest.mark.parametrize("initialisation", [True, False, "gaussian", "orthogonal"])
def test_other_initialisations_are_used(initialisation: bool | str) -> None:
    config = ModelConfig.model_validate(
        {"model_name_or_path": "m", "use_peft": True, "init_lora_weights": initialisation}
    )
    refuse_initialisation(config, "FSDP2")


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_gradients_without_a_norm_are_refused() -> None:
    check_zero({"stage": 2, "compute_grad_norm": True})
    with pytest.raises(LaunchError, match=r"zero_optimization\.compute_grad_norm false is not supported"):
        check_zero({"stage": 2, "compute_grad_norm": False})


def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    checkpoint = build_tiny("qwen2_5_vl", tmp_path)
    refuse_unshardable(make_policy(checkpoint, use_peft=True), "ZeRO-3")
    on_head = make_policy(checkpoint, use_peft=True, lora_target_modules=["q_proj", "lm_head"])
    with pytest.raises(ConfigError, match="an adapter on the LM head cannot be trained with ZeRO-3"):
        refuse_unshardable(on_head, "ZeRO-3")


@pytest.mark.parametrize("is_frozen", [True, False])
def test_input_gradients_are_for_trained_vision_towers(tmp_path: Path, is_frozen: bool) -> None:
    excluded = None if is_frozen else []
    policy = make_policy(build_tiny("qwen2_5_vl", tmp_path), use_peft=True, lora_exclude_modules=excluded)
    require_input_gradients(policy)
    embeddings = policy.transformer.get_input_embeddings()
    assert not embeddings.weight.requires_grad
    assert embeddings(torch.tensor([[1, 2]])).requires_grad != is_frozen
