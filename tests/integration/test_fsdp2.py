"""FSDP2 in this process alone, which shards a model for a single rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.fsdp2 import FSDP2
from rl_vlm.distributed.ranks import Ranks
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
