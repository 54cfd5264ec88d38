"""Bytes that the modules of a model keep for the backward pass.

forward of a module ─ autograd saves a tensor ─► counted for the innermost module, unless a weight or counted before
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rl_vlm.model.blocks import block_of

POLICY = "policy"
OUTSIDE = "loss"
"""Name for tensors that are saved outside of the model's forward."""


class Kept(NamedTuple):
    """Bytes that one module keeps, or several of a kind together."""

    name: str
    num_modules: int
    bytes: int


@dataclass
class SavedByForward:
    """Bytes that one forward of the whole model has saved, by module."""

    bytes_by_module: Counter[str] = field(default_factory=Counter)
    counted: set[int] = field(default_factory=set)
    """Addresses of the storages, which live until the backward pass."""


class SavedBytes:
    """A context that counts the bytes that forwards of `model` save for backward. Each storage counts once.

    Activations that are recomputed in the backward pass or moved to host memory do not count.
    """

    def __init__(self, model: nn.Module, named: nn.Module) -> None:
        """Name modules as in `named`, the transformers model within `model`. Modules around it are named `POLICY`."""
        self.model = model
        self.names = dict.fromkeys(model.modules(), POLICY)
        self.names |= {module: path for path, module in named.named_modules() if path}
        self.running: list[tuple[str, set[int]]] = []
        """Modules whose forward is running, outermost first, with the addresses of their weights."""
        self.forwards = [SavedByForward()]
        self.opened = ExitStack()

    def __enter__(self) -> SavedBytes:
        for module in self.names:
            before = module.register_forward_pre_hook(self.begin)
            after = module.register_forward_hook(self.end, always_call=True)
            self.opened.callback(before.remove)
            self.opened.callback(after.remove)
        self.opened.enter_context(saved_tensors_hooks(self.save, lambda tensor: tensor))
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()

    def begin(self, module: nn.Module, *_: Any) -> None:
        if module is self.model:
            self.forwards.append(SavedByForward())
        weights = {address(weight) for weight in module.parameters()}  # gathered ones, if ranks hold shards
        self.running.append((self.names[module], weights))

    def end(self, *_: Any) -> None:
        self.running.pop()

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        found, forward = address(tensor), self.forwards[-1]
        is_weight = any(found in weights for _, weights in self.running)
        if found and not is_weight and found not in forward.counted:
            forward.counted.add(found)
            name = self.running[-1][0] if self.running else OUTSIDE
            forward.bytes_by_module[name] += local(tensor).untyped_storage().nbytes()
        return tensor

    @property
    def largest(self) -> Mapping[str, int]:
        """Return the bytes by module of the forward that saved most."""
        return max((forward.bytes_by_module for forward in self.forwards), key=Counter.total)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor if it is not sharded."""
    return getattr(tensor, "_local_tensor", tensor)


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    part = local(tensor)
    return part.untyped_storage().data_ptr() if part.layout == torch.strided else 0


def by_layer(bytes_by_module: Mapping[str, int]) -> list[Kept]:
    """Add up the bytes of each layer's modules, largest first. Modules outside of layers stay single."""
    return added_up(bytes_by_module, lambda name: block_of(f"{name}.").removesuffix(".") or name)


def by_kind(bytes_by_module: Mapping[str, int]) -> list[Kept]:
    """Add up the bytes of the same module over all layers, such as `layers.*.mlp`, largest first."""
    return added_up(bytes_by_module, lambda name: re.sub(r"\.\d+(?=\.|$)", ".*", name))


def added_up(bytes_by_module: Mapping[str, int], key: Callable[[str], str]) -> list[Kept]:
    groups: dict[str, list[int]] = defaultdict(list)
    for name, size in bytes_by_module.items():
        groups[key(name)].append(size)
    found = [Kept(name, len(sizes), sum(sizes)) for name, sizes in groups.items()]
    return sorted(found, key=lambda kept: -kept.bytes)
