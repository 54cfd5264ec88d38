"""What a generator is sent: whole weights by their names in checkpoints, however the policy is held by its ranks."""

import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.multiprocessing import spawn  # type: ignore[attr-defined]
from transformers.core_model_loading import revert_weight_conversion

from rl_vlm.model.families import TokenRules
from rl_vlm.model.policy import Policy
from rl_vlm.rollout.vllm.client import VLLMClient
from rl_vlm.rollout.vllm.servers import VLLMServers
from rl_vlm.rollout.weights import PolicyWeights
from tests.helpers.builders import make_policy
from tests.helpers.tiers import in_tiers, short_test_of_families
from tests.tiny.build import TINY_FAMILIES, build_tiny

LORA = {"use_peft": True, "lora_r": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen vision": {"freeze_vision_tower": True},
    "adapter": LORA,
    "merged": LORA | {"lora_target_modules": ["q_proj", "down_proj"]},
    "merged vision": LORA | {"lora_target_modules": ["qkv", "k_proj"], "lora_exclude_modules": []},
}
NUM_RANKS = 2


class Server(VLLMClient):
    """Keeps the files that it is sent."""

    def __init__(self, received: Path) -> None:
        super().__init__("http://server", "token", timeout=1.0)
        self.received, self.version = received, ""

    def get(self, path: str) -> Any:
        return {
            "/rl_vlm/setup": {"max_model_len": 64, "weight_transfer": "rl_vlm"},
            "/v1/models": {"data": []},
            "/weight_info": {"weight_version": self.version},
            "/metrics": None,
        }[path]

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        body = body or {}
        directory = body.get("update_info", {}).get("directory") or body.get("lora_path")
        if directory:
            shutil.copytree(directory, self.received)
        self.version = body.get("new_version", self.version)
        return {"success": True}


class Renderer:
    processor = None

    def unexpanded_ids(self, sample: object) -> list[int]:
        return []


def policy_and_source(checkpoint: Path, variant: str) -> tuple[Policy, PolicyWeights]:
    torch.manual_seed(0)
    policy = make_policy(checkpoint, **VARIANTS[variant])
    return policy, PolicyWeights(policy, "adapter" if variant == "adapter" else "merge")


def send(source: PolicyWeights, folder: Path, rank: int) -> int:
    """Sync as one rank does; the files that rank 0 sends are kept in `received`."""
    clients = [Server(folder / "received")]
    engine = VLLMServers(clients, TokenRules([], []), Renderer(), folder / "weight_sync", rank == 0, expected={})
    return engine.sync(source, 1)


def fsdp2(policy: Policy) -> Callable[[nn.Parameter], Tensor]:
    """Shard as FSDP2 does: a unit for each layer, and one for all the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model: Any = policy.transformer
    for layer in [*model.get_decoder().layers, *model.model.visual.blocks]:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    return lambda parameter: parameter.to_local()  # type: ignore[attr-defined]


def zero3(policy: Policy) -> Callable[[nn.Parameter], Tensor]:
    """Shard as DeepSpeed does; vectors are small enough for every rank to keep them whole."""
    os.environ |= {"LOCAL_RANK": str(get_rank()), "DS_ACCELERATOR": "cpu"}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for minutes
    stage = {"stage": 3, "stage3_param_persistence_threshold": 200}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage, "zero_force_ds_cpu_optimizer": False}
    trained = [p for p in policy.parameters() if p.requires_grad]
    deepspeed.initialize(model=policy, config=config, optimizer=torch.optim.AdamW(trained), dist_init_required=False)
    return lambda parameter: parameter.ds_tensor  # type: ignore[attr-defined]


SHARDINGS = {"FSDP2": fsdp2, "ZeRO-3": zero3}


def send_all_variants(rank: int, sharding: str, checkpoint: Path, folder: Path) -> None:
    """One of the processes that hold a policy together."""
    init_process_group("gloo", f"file://{folder}/rendezvous", timedelta(minutes=5), NUM_RANKS, rank)
    for variant in VARIANTS:
        policy, source = policy_and_source(checkpoint, variant)
        num_elements = sum(parameter.numel() for parameter in policy.parameters())
        local = SHARDINGS[sharding](policy)
        before = {name: local(parameter).clone() for name, parameter in policy.named_parameters()}
        assert sum(map(Tensor.numel, before.values())) < 0.6 * num_elements
        assert source.is_sharded
        for sync in ("first", "second"):  # the first leaves no trace
            num_bytes = send(source, folder / variant / sync, rank)
            assert bool(num_bytes) == (rank == 0)
        for name, parameter in policy.named_parameters():
            assert torch.equal(local(parameter), before[name]), name
    destroy_process_group()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("qwen2_5_vl", tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("sharding", in_tiers(SHARDINGS, (), {"FSDP2"}))
def test_servers_get_the_weights_of_a_sharded_policy_whole(checkpoint: Path, sharding: str, tmp_path: Path) -> None:
    if sharding == "ZeRO-3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is in the development requirements on Linux only")
    spawn(send_all_variants, (sharding, checkpoint, tmp_path), nprocs=NUM_RANKS)
    for variant in VARIANTS:
        _, source = policy_and_source(checkpoint, variant)
        assert not source.is_sharded
        send(source, tmp_path / variant / "whole", rank=0)
        expected = received(tmp_path / variant / "whole")
        for sync in ("first", "second"):
            found = received(tmp_path / variant / sync)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def received(folder: Path) -> dict[str, Tensor]:
    """The weights that the server of `send` has got, in one file."""
    (path,) = (folder / "received").glob("*.safetensors")
    return load_file(path)


def test_merging_leaves_the_base_weights_as_they_are(checkpoint: Path) -> None:
    policy, source = policy_and_source(checkpoint, "merged vision")
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    sent = dict(source.trained_weights())
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())
    plain = dict(PolicyWeights(make_policy(checkpoint), "adapter").trained_weights())
    assert sent.keys() == plain.keys()
    changed = {name for name, weight in sent.items() if not torch.equal(weight, plain[name])}
    assert changed == {name for name in sent if name.endswith(("qkv.weight", "k_proj.weight"))}


@pytest.mark.parametrize("family", short_test_of_families(TINY_FAMILIES))
def test_names_and_shapes_block_by_block_are_those_of_the_whole_checkpoint(family: str, tmp_path: Path) -> None:
    policy = make_policy(build_tiny(family, tmp_path))
    sent = list(PolicyWeights(policy, "adapter").trained_weights())
    model = policy.transformer
    whole = revert_weight_conversion(model, {name: parameter.detach() for name, parameter in model.named_parameters()})
    assert sorted(name for name, _ in sent) == sorted(whole)
    assert all(torch.equal(weight, whole[name]) for name, weight in sent)
