"""The weights to send to an engine that keeps its own model: the policy's adapter, or its trained weights.

full fine-tuning   all weights, without a frozen vision tower
LoRA               the adapter alone; or, with `lora_sync: merge`, base weights merged with it at every sync

If ranks hold shards (ZeRO-3, FSDP2), all ranks gather one weight after the other.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rl_vlm.config.parts import CHANGING_THE_BASE
from rl_vlm.distributed.shards import is_shard, whole, whole_copy
from rl_vlm.errors import ConfigError
from rl_vlm.model.blocks import as_in_checkpoints, by_block, untied
from rl_vlm.model.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json
from rl_vlm.model.lora import adapts_tied_weight
from rl_vlm.model.policy import Policy
from rl_vlm.rollout.engine import WeightSource
from rl_vlm.rollout.vllm.arguments import read_weights


class PolicyWeights:
    """The policy as the `WeightSource` of a rollout engine."""

    def __init__(self, policy: Policy, lora_sync: str) -> None:
        self.policy = policy
        self.has_adapter = policy.model is not policy.transformer
        self.sends_adapter = self.has_adapter and lora_sync == "adapter"

    def adapter_rank(self) -> int | None:
        """Return the rank of the adapter to send, or None without one.

        Raises ConfigError if vLLM cannot load the adapter, or the weights with the adapter merged in.
        """
        if not self.sends_adapter:
            if self.has_adapter and adapts_tied_weight(self.policy.transformer):
                raise ConfigError(
                    "rollout.lora_sync: merge: the adapter is on the LM head or on the embeddings, which this model "
                    "ties, and vLLM has one weight for both. Set lora_sync: adapter, leave lm_head out of "
                    "lora_target_modules, or set rollout.engine: hf"
                )
            return None
        adapter = self.policy.model.peft_config["default"]
        parameters = self.policy.transformer.named_parameters()
        trained = (name for name, p in parameters if "lora_" in name and p.requires_grad)
        reason = why_not_an_adapter(adapter, trained, self.policy.family.vision_prefixes)
        if reason:
            raise ConfigError(f"vLLM cannot load this adapter: {reason}. Set rollout.lora_sync: merge")
        return adapter.r

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds a shard of the policy's weights."""
        return any(is_shard(parameter) for parameter in self.policy.parameters())

    def join_gathering(self) -> None:
        """Join the all-gather on a rank that sends no weights."""
        if self.is_sharded:
            for _ in self.adapter_weights() if self.sends_adapter else self.trained_weights():
                pass

    def save_adapter(self, directory: Path) -> int:
        """Write the adapter in PEFT's format, and return the size of its weights in bytes."""
        self.policy.model.save_pretrained(
            directory,
            selected_adapters=["default"],
            save_embedding_layers=False,
            state_dict=dict(self.adapter_weights()),
        )
        return (directory / ADAPTER_WEIGHTS).stat().st_size

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that a LoRA run trains, unsharded, by their names in the model."""
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad:
                yield name, whole(parameter)

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights except a frozen vision tower's, by their names in checkpoints, in compute precision.

        Other frozen weights are included: vLLM fuses layers (query, key and value become one), and loads a fused layer
        completely or not at all. Weights are gathered and merged for one block of the model at a time.
        """
        model = self.policy.transformer
        frozen = self.policy.family.vision_prefixes if self.policy.vision.is_frozen else ()
        moved = ((name, weight) for name, weight in untied(merged_weights(model)) if not name.startswith(frozen))
        for block in by_block(moved):
            weights = {name: whole(weight) for name, weight in block}
            for name, weight in as_in_checkpoints(model, weights).items():
                yield name, weight.to(self.policy.compute_dtype)


class CheckpointWeights(WeightSource):
    """A checkpoint's directory as the `WeightSource` of a rollout engine."""

    def __init__(self, directory: Path, is_adapter: bool) -> None:
        """Raise ConfigError if `directory` is not a local directory."""
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory: servers can be sent checkpoints of this file system only")
        self.directory = directory
        self.sends_adapter = is_adapter

    def save_adapter(self, directory: Path) -> int:
        """Copy the adapter's files, and return the size of its weights in bytes."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copy(self.directory / name, directory / name)
        return (directory / ADAPTER_WEIGHTS).stat().st_size

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over all weights of the checkpoint."""
        return read_weights(self.directory)


@torch.no_grad()
def merged_weights(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of a model, with adapters merged in.

    Adapters are merged into an unsharded copy of one module at a time, so the base weights never change. Weights
    without an adapter are the model's own, and may be sharded.
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


def why_not_in_vllm(directory: Path, vision_prefixes: tuple[str, ...]) -> str | None:
    """Return the reason why vLLM cannot load the adapter in a directory, or None if it can."""
    from safetensors import safe_open

    adapter = SimpleNamespace(**read_json(directory / ADAPTER_CONFIG))
    with safe_open(directory / ADAPTER_WEIGHTS, "pt") as file:
        names = [name.removeprefix("base_model.model.") for name in [*file.keys()]]
    return why_not_an_adapter(adapter, names, vision_prefixes)


def why_not_an_adapter(adapter: Any, trained: Iterable[str], vision_prefixes: tuple[str, ...]) -> str | None:
    """Return the reason why vLLM cannot load an adapter, or None if it can.

    `adapter` has the attributes of PEFT's `LoraConfig`, and `trained` are the names of its weights in the model.
    """
    if adapter.use_dora:
        return "it uses DoRA"
    if adapter.modules_to_save:
        return f"it holds fully trained modules ({', '.join(adapter.modules_to_save)})"
    if adapter.bias != "none":
        return f"it trains biases (bias: {adapter.bias})"
    if adapter.init_lora_weights in CHANGING_THE_BASE:
        return f"its initialisation ({adapter.init_lora_weights}) has changed the base weights"
    on_vision = [name for name in trained if name.startswith(vision_prefixes)]
    if on_vision:
        return f"it is on the vision tower ({on_vision[0]})"
    return None
