"""FSDP2 in this process alone, which shards a model for a single rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.fsdp2 import FSDP2
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.shards import whole as all_gathered
from rl_vlm.model.reference import INITIAL_ADAPTER, Reference
from rl_vlm.types import Forward
from tests.helpers.builders import make_groups, make_policy, noise_image, whole


@pytest.fixture
def fsdp2(tmp_path: Path) -> Iterator[FSDP2]:
    ranks = Ranks()
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield FSDP2(ranks, RunConfig.model_validate({"model": {"model_name_or_path": "m"}}))
    destroy_process_group()


@pytest.mark.parametrize("has_initial_adapter", [False, True])
def test_adapters_are_trained_if_the_reference_gathers_them_first(
    fsdp2: FSDP2, tiny_checkpoint: Path, tmp_path: Path, has_initial_adapter: bool
) -> None:
    policy = make_policy(tiny_checkpoint, use_peft=True, lora_r=4)
    if has_initial_adapter:
        policy.model.save_pretrained(tmp_path / "adapter")
        policy.model.load_adapter(tmp_path / "adapter", adapter_name=INITIAL_ADAPTER, is_trainable=False)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    batch = whole(make_groups(tiny_checkpoint, [([noise_image(16, 16, seed=1)], [3, 2])]), shared=True)
    with_adapter = policy(Forward(batch)).logprobs_NT.detach()
    fsdp2.place(policy)

    reference = Reference(policy, frozen=None)(Forward(batch)).logprobs_NT
    assert torch.allclose(reference, with_adapter, atol=1e-5) == has_initial_adapter
    policy(Forward(batch)).logprobs_NT.sum().backward()
    assert {name for name, parameter in policy.named_parameters() if parameter.grad is not None} == trained


def test_layers_are_gathered_in_16_bits_and_held_in_32(fsdp2: FSDP2, tiny_checkpoint: Path) -> None:
    policy = make_policy(tiny_checkpoint, dtype="bfloat16")
    batch = whole(make_groups(tiny_checkpoint, [([noise_image(16, 16, seed=1)], [3, 2])]), shared=True)
    expected = policy(Forward(batch)).logprobs_NT.detach()
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    fsdp2.place(policy)

    decoder: Any = policy.transformer.get_decoder()
    read: dict[type, torch.dtype] = {}
    for module in (decoder.embed_tokens, decoder.layers[0].mlp.up_proj):
        module.register_forward_pre_hook(lambda module, inputs: read.update({type(module): module.weight.dtype}))
    logprobs = policy(Forward(batch)).logprobs_NT
    assert read == {torch.nn.Embedding: torch.float32, torch.nn.Linear: torch.bfloat16}
    assert torch.equal(logprobs, expected)  # norms have weights of 1, which bfloat16 holds exactly
    logprobs.sum().backward()
    for name, parameter in policy.named_parameters():
        assert torch.equal(all_gathered(parameter), before[name])
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
