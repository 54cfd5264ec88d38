"""The adapter of CogVLM's model, on its stand-in: positions, caches and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rl_vlm.config.own_code import class_name, has_own_code
from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ConfigError
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.model.quantization import checkpoint_config
from rl_vlm.model.remote.cogvlm import append, as_tuples
from rl_vlm.model.trainable import trained_names
from rl_vlm.rollout.vllm.arguments import engine_arguments
from rl_vlm.types import Prompt, Sample
from tests.helpers.remote_code.build import build_remote
from tests.helpers.tiny_run import make_config

IMAGE = 4
"""Id of the token of an image in the stand-in's tokenizer."""
TYPES = [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
"""A first token, the six of an image of 4 x 4 patches, and text."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_remote("cogvlm", tmp_path_factory.mktemp("cogvlm") / "cogvlm")


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    config = make_config(checkpoint, checkpoint.parent / "run", trust_remote_code=True)
    return load_policy(config, str(checkpoint)).eval()


def inputs(num: int = 10) -> dict[str, torch.Tensor]:
    """The first tokens of a prompt with an image."""
    ids = torch.tensor([[3, *[IMAGE] * 6, 20, 30, 40]])[:, :num]
    return {"input_ids": ids, "token_type_ids": torch.tensor([TYPES])[:, :num], "attention_mask": torch.ones_like(ids)}


def pixels() -> torch.Tensor:
    return torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_the_facts_of_a_kind_without_a_model_type(checkpoint: Path, policy: Policy) -> None:
    config = checkpoint_config(str(checkpoint), ModelConfig(model_name_or_path=str(checkpoint), trust_remote_code=True))
    assert has_own_code(config) and config.model_type == ""
    assert class_name(config) == policy.family.model_type == "CogVLMForCausalLM"
    assert config.image_token_id == IMAGE and policy.banned_token_ids == [IMAGE]
    assert policy.family.vision_modules == ("model.vision",)  # inside of the language model
    projector = trained_names(policy.transformer, policy.family, ["projector"])
    assert {name.split(".")[2] for name in projector} == {"conv", "linear_proj"}
    tower = trained_names(policy.transformer, policy.family, ["vision_tower"])
    text = trained_names(policy.transformer, policy.family, ["language_model"])
    assert tower | projector | text == {name for name, _ in policy.transformer.named_parameters()}
    assert not text & (tower | projector) and any("vision_expert" in name for name in text)
    assert policy.family.first_images_only == "its code puts the image before all text"


def test_the_tokens_inside_of_an_image_share_a_position(policy: Policy) -> None:
    ids, types = inputs()["input_ids"][0], torch.tensor(TYPES)
    prompt = Prompt(Sample("s", [], [], {}, []), ids, {"token_type_ids": types}, {})
    found = policy.family.prompt_positions(policy.transformer, prompt)
    assert found.tolist() == [[0, 1, 2, 2, 2, 2, 3, 4, 5, 6]]


@torch.no_grad()
def test_tokens_after_a_cache_get_the_logits_of_one_forward(policy: Policy) -> None:
    """The published layers take and return tuples. The engine appends to a cache of transformers."""
    model: Any = policy.transformer
    whole = model(**inputs(), pixel_values=pixels()).logits  # without positions: the published forward
    cache, positions = DynamicCache(), torch.tensor([[0, 1, 2, 2, 2, 2, 3, 4, 5, 6]])
    first = model(
        **inputs(8), pixel_values=pixels(), position_ids=positions[:, :8], past_key_values=cache, use_cache=True
    )
    assert first.past_key_values is cache and cache.get_seq_length() == 8
    later = {"input_ids": torch.tensor([[30, 40]]), "attention_mask": torch.ones(1, 10, dtype=torch.long)}
    second = model(**later, position_ids=positions[:, 8:], past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 10
    assert torch.allclose(torch.cat([first.logits, second.logits], dim=1), whole, atol=1e-5)


def test_tuples_are_those_of_the_cache() -> None:
    cache = DynamicCache()
    assert as_tuples(None) is None and as_tuples(cache) is None
    keys, values = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    append(cache, [(keys[:, :, :2], values[:, :, :2])])
    append(cache, [(keys, values)])
    (layer,) = as_tuples(cache) or [None]
    assert layer is not None and torch.equal(layer[0], keys) and torch.equal(layer[1], values)


@torch.no_grad()
def test_weights_of_32_bits_run_in_16_bits(policy: Policy) -> None:
    """The published layers write products, which autocast makes in 16 bits, into tensors like their input."""
    model: Any = policy.transformer
    expected = model(**inputs(), pixel_values=pixels()).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**inputs(), pixel_values=pixels()).logits
    assert 0 < (found - expected).abs().max() < 0.02
    assert model.get_input_embeddings()(torch.tensor([1])).dtype == torch.float32


@pytest.mark.parametrize("part", [True, "language_model"])
def test_gradient_checkpointing_is_refused(checkpoint: Path, tmp_path: Path, part: Any) -> None:
    config = make_config(checkpoint, tmp_path, trust_remote_code=True, gradient_checkpointing=part)
    named = "true" if part is True else part
    with pytest.raises(
        ConfigError,
        match=rf"memory.gradient_checkpointing: {named} is not possible: CogVLMForCausalLM, the model's code, does not "
        r"support it. Set it to false",
    ):
        load_policy(config, str(checkpoint))


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_vllm_is_refused(checkpoint: Path, tmp_path: Path, engine: str) -> None:
    config = make_config(checkpoint, tmp_path, trust_remote_code=True, engine=engine)
    with pytest.raises(ConfigError, match=f"rollout.engine: {engine} cannot be used with CogVLMForCausalLM: its own"):
        engine_arguments(config, str(checkpoint), lora_rank=None)
