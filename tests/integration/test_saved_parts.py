"""The files of a checkpoint: an adapter of any module, parts of several ranks, and no updates after the save."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoProcessor

from rl_vlm.checkpoint.writer import CheckpointFiles, CheckpointWriter
from rl_vlm.config.schema import ModelConfig, TrainConfig
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.optimizer_files import OptimizerFiles, load_optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import CheckpointError
from rl_vlm.model.loading import load_model
from rl_vlm.model.saving import PolicyFiles
from tests.helpers.builders import make_policy
from tests.helpers.checkpoints import SlowFiles


@pytest.mark.parametrize("in_parts", [False, True])
def test_an_adapter_of_the_embedding_is_loaded_as_it_was_saved(in_parts, tiny_checkpoint, tmp_path):
    settings: dict[str, Any] = {"use_peft": True, "lora_r": 2, "lora_target_modules": ["embed_tokens", "q_proj"]}
    policy = make_policy(tiny_checkpoint, **settings)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    for i, parameter in enumerate(trained.values()):
        parameter.data.fill_(float(i))
    processor = AutoProcessor.from_pretrained(tiny_checkpoint)
    PolicyFiles(policy, processor, Ranks(), in_parts).write(tmp_path)
    loaded = load_model(str(tmp_path), None, ModelConfig(model_name_or_path=str(tmp_path), **settings))
    found = {name: p for name, p in loaded.named_parameters() if p.requires_grad}
    assert found.keys() == trained.keys()
    assert any("embed_tokens" in name for name in found)
    assert all(found[name].unique().tolist() == [float(i)] for i, name in enumerate(trained))


def test_optimizer_state_without_the_part_of_a_rank_is_refused(tiny_checkpoint, tmp_path):
    policy = make_policy(tiny_checkpoint, use_peft=True, lora_r=2)
    optimizer = Optimizer(DDP(Ranks(), max_grad_norm=1.0), policy, TrainConfig(output_dir=str(tmp_path)), num_steps=1)
    *others, last = optimizer.trainable
    (tmp_path / "optimizer").mkdir()
    state = {f"{name}/step": torch.full((), 3.0) for name in others}
    save_file(state, tmp_path / "optimizer" / "state-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=f"no optimizer state of 1 weights that this run trains, such as {last}"):
        load_optimizer(optimizer, tmp_path)
    save_file({f"{last}/step": torch.full((), 3.0)}, tmp_path / "optimizer" / "state-00002-of-00002.safetensors")
    load_optimizer(optimizer, tmp_path)
    assert {float(state["step"]) for state in optimizer.torch_optimizer.state.values()} == {3.0}


def change(tensors: list[torch.Tensor] | list[nn.Parameter]) -> None:
    for tensor in tensors:
        tensor.data.fill_(7.0)


@pytest.mark.parametrize("use_peft", [False, True])
def test_updates_after_a_save_do_not_reach_its_files(use_peft, tiny_checkpoint, tmp_path):
    policy, ranks = make_policy(tiny_checkpoint, use_peft=use_peft), Ranks()
    optimizer = Optimizer(DDP(ranks, max_grad_norm=1.0), policy, TrainConfig(output_dir=str(tmp_path)), num_steps=1)
    for parameter in optimizer.trainable.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.torch_optimizer.step()
    processor, may_write, writer = (
        AutoProcessor.from_pretrained(tiny_checkpoint),
        SlowFiles(is_whole=False),
        CheckpointWriter(tmp_path, ranks),
    )

    def snapshot() -> CheckpointFiles:
        model, moments = PolicyFiles(policy, processor, ranks), OptimizerFiles(optimizer, ranks)
        return CheckpointFiles([("", may_write), ("", model), ("", moments)], {"state.json": b"{}"})

    writer.write(1, snapshot, lambda: None)
    change([*optimizer.trainable.values()])
    change([value for state in optimizer.torch_optimizer.state.values() for value in state.values()])
    may_write.may_go.set()
    writer.finish()
    writer.close()
    saved = tmp_path / "checkpoint-1"
    (weights,) = saved.glob("*model.safetensors")
    assert not any((tensor == 7.0).all() for tensor in load_file(weights).values())
    (moments,) = (saved / "optimizer").iterdir()
    found = load_file(moments)
    assert {value.item() for name, value in found.items() if name.endswith("/step")} == {1.0}
    firsts = [value for name, value in found.items() if name.endswith("/exp_avg")]
    assert firsts and all(torch.allclose(value, torch.full_like(value, 0.1)) for value in firsts)  # 1 - beta1
    assert (saved / "state.json").read_bytes() == b"{}"
