"""What a generator with weights of its own needs to catch up with the policy: its adapter, or what it trains.

full fine-tuning   the trained weights alone; a frozen vision tower stays where it is
LoRA               the adapter alone, never merged; or, by choice, base weights freshly merged with it

Where ranks hold shards (ZeRO-3, FSDP2) weights are gathered one after the other, which all ranks do together.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from rl_vlm.errors import ConfigError
from rl_vlm.generation.vllm_common import read_weights
from rl_vlm.policy import Policy


class PolicyWeights:
    """The policy as the `WeightSource` of a rollout engine."""

    def __init__(self, policy: Policy, lora_sync: str) -> None:
        self.policy = policy
        self.has_adapter = policy.model is not policy.transformer
        self.sends_adapter = self.has_adapter and lora_sync == "adapter"

    def adapter_rank(self) -> int | None:
        """The rank r of the adapter that is sent, or None. Raises ConfigError for one that vLLM cannot load."""
        if not self.sends_adapter:
            return None
        reason = why_not_an_adapter(self.policy)
        if reason:
            raise ConfigError(f"vLLM cannot load this adapter: {reason}. Set rollout.lora_sync: merge")
        return self.policy.model.peft_config["default"].r

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the policy's weights, so that all must gather together."""
        return any(is_shard(parameter) for parameter in self.policy.parameters())

    def join_gathering(self) -> None:
        """The part in sending weights of a rank that sends none."""
        if self.is_sharded:
            for _ in self.adapter_weights() if self.sends_adapter else self.trained_weights():
                pass

    def save_adapter(self, directory: Path) -> int:
        """Write the adapter as PEFT does; returns the bytes of its weights."""
        self.policy.model.save_pretrained(
            directory,
            selected_adapters=["default"],
            save_embedding_layers=False,
            state_dict=dict(self.adapter_weights()),
        )
        return (directory / "adapter_model.safetensors").stat().st_size

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What a LoRA run trains, whole, by its names in the model."""
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad:
                yield name, whole(parameter)

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of the parts that training moves, by their names in checkpoints, as precise as the policy computes.

        The parts are the vision tower and all the rest: vLLM fuses layers (query, key and value become one), and takes
        a fused layer whole or not at all. What is sharded or merged is whole for one block of the model at a time:
        names and shapes in checkpoints can be those of several weights joined, which one block always holds.
        """
        from transformers.core_model_loading import revert_weight_conversion

        model = self.policy.transformer
        frozen = self.policy.family.vision_prefixes if self.policy.vision.is_frozen else ()
        moved = ((name, weight) for name, weight in untied(merged_weights(model)) if not name.startswith(frozen))
        for _, block in groupby(moved, key=lambda named: block_of(named[0])):
            weights = {name: whole(weight) for name, weight in block}
            for name, weight in revert_weight_conversion(model, weights).items():
                yield name, weight.to(self.policy.compute_dtype)


class CheckpointWeights:
    """A checkpoint's directory as the `WeightSource` of a rollout engine."""

    def __init__(self, directory: Path, is_adapter: bool) -> None:
        """Raises ConfigError if it is no local directory."""
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory: servers can be sent checkpoints of this file system only")
        self.directory = directory
        self.sends_adapter = is_adapter
        self.is_sharded = False

    def join_gathering(self) -> None:
        """Files are whole."""

    def save_adapter(self, directory: Path) -> int:
        """Copy the adapter's files; returns the bytes of its weights."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(self.directory / name, directory / name)
        return (directory / "adapter_model.safetensors").stat().st_size

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the checkpoint."""
        return read_weights(self.directory)


def is_shard(parameter: Tensor) -> bool:
    """Whether this rank holds a part of the parameter: as a DTensor (FSDP2), or under DeepSpeed ZeRO-3."""
    return hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id")


def whole(parameter: Any) -> Tensor:
    """The parameter itself, or a gathered copy of what is sharded, which all ranks must ask for together."""
    if hasattr(parameter, "full_tensor"):
        return parameter.detach().full_tensor()
    if hasattr(parameter, "ds_id"):
        parameter.all_gather()
        gathered = parameter.detach().clone()
        parameter.partition()
        return gathered
    return parameter.detach()


def whole_copy(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters are whole."""
    copies: dict[int, Any] = {id(p): nn.Parameter(whole(p)) for p in module.parameters() if is_shard(p)}
    return copy.deepcopy(module, copies)


@torch.no_grad()
def merged_weights(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All weights of a model. Those under an adapter are merged with it in whole copies, one module at a time: the base
    weights are never touched. The others are the model's own, and may be sharded.
    """
    for name, module in model.named_children():
        wrapper: Any = module
        if hasattr(wrapper, "modules_to_save"):
            module = wrapper.modules_to_save["default"]
        elif hasattr(wrapper, "get_base_layer"):
            merged: Any = whole_copy(wrapper)
            merged.merge(adapter_names=["default"])
            module = merged.get_base_layer()
        yield from merged_weights(module, f"{prefix}{name}.")
    for name, parameter in model.named_parameters(recurse=False):
        yield f"{prefix}{name}", parameter


def untied(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each weight once, under the first of its names."""
    seen = WeakTensorKeyDictionary()  # forgets merged copies, whose addresses serve again
    for name, weight in weights:
        if weight not in seen:
            seen[weight] = name
            yield name, weight


def block_of(name: str) -> str:
    """The first numbered module around a weight: `model.layers.3.` for `model.layers.3.mlp.up_proj.weight`, or none."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


def why_not_an_adapter(policy: Policy) -> str | None:
    """Why vLLM cannot load the policy's adapter, or None if it can."""
    adapter = policy.model.peft_config["default"]
    if adapter.use_dora:
        return "it uses DoRA"
    if adapter.modules_to_save:
        return f"it holds fully trained modules ({', '.join(adapter.modules_to_save)})"
    if adapter.bias != "none":
        return f"it trains biases (bias: {adapter.bias})"
    if adapter.init_lora_weights in ("pissa", "olora"):
        return f"its initialisation ({adapter.init_lora_weights}) has changed the base weights"
    names = (name for name, p in policy.transformer.named_parameters() if "lora_" in name and p.requires_grad)
    on_vision = [name for name in names if name.startswith(policy.family.vision_prefixes)]
    if on_vision:
        return f"it is on the vision tower ({on_vision[0]})"
    return None
