"""What a generator with weights of its own needs to catch up with the policy: its adapter, or what it trains.

full fine-tuning   the trained weights alone; a frozen vision tower stays where it is
LoRA               the adapter alone, never merged; or, by choice, base weights freshly merged with it
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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

    def save_adapter(self, directory: Path) -> int:
        """Write the adapter as PEFT does; returns the bytes of its weights."""
        self.policy.model.save_pretrained(directory, selected_adapters=["default"], save_embedding_layers=False)
        return (directory / "adapter_model.safetensors").stat().st_size

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of the parts that training moves, by their names in checkpoints, as precise as the policy computes.

        The parts are the vision tower and all the rest: vLLM fuses layers (query, key and value become one), and takes
        a fused layer whole or not at all.
        """
        from transformers.core_model_loading import revert_weight_conversion

        prefixes = self.policy.family.vision_prefixes
        weights = dict(merged_weights(self.policy.transformer) if self.has_adapter else whole_weights(self.policy))
        vision_is_frozen = self.policy.vision.is_frozen
        moved = {n: w for n, w in weights.items() if not (vision_is_frozen and n.startswith(prefixes))}
        moved = {n: w for w, n in {w.data_ptr(): (w, n) for n, w in reversed(moved.items())}.values()}  # tied ones once
        for name, weight in revert_weight_conversion(self.policy.transformer, moved).items():
            yield name, weight.to(self.policy.compute_dtype)


class CheckpointWeights:
    """A checkpoint's directory as the `WeightSource` of a rollout engine."""

    def __init__(self, directory: Path, is_adapter: bool) -> None:
        """Raises ConfigError if it is no local directory."""
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory: servers can be sent checkpoints of this file system only")
        self.directory = directory
        self.sends_adapter = is_adapter

    def save_adapter(self, directory: Path) -> int:
        """Copy the adapter's files; returns the bytes of its weights."""
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(self.directory / name, directory / name)
        return (directory / "adapter_model.safetensors").stat().st_size

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the checkpoint."""
        return read_weights(self.directory)


def whole_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """All weights; those that are sharded (DTensor) are gathered."""
    for name, parameter in policy.transformer.named_parameters():
        weight: Any = parameter.detach()
        yield name, weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@torch.no_grad()
def merged_weights(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All weights of a model under an adapter, which is merged into copies: the base weights are never touched."""
    for name, module in model.named_children():
        wrapper: Any = module
        if hasattr(wrapper, "modules_to_save"):
            module = wrapper.modules_to_save["default"]
        elif hasattr(wrapper, "get_base_layer"):
            merged = copy.deepcopy(wrapper)
            merged.merge(adapter_names=["default"])
            module = merged.get_base_layer()
        yield from merged_weights(module, f"{prefix}{name}.")
    for name, parameter in model.named_parameters(recurse=False):
        yield f"{prefix}{name}", parameter.detach()


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
