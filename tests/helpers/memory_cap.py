"""A cap on the memory of tensors on CPUs: an operation that would exceed it raises torch.OutOfMemoryError."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryCap(TorchDispatchMode):
    """Counts the bytes of storages that are allocated in this context, until they are freed.

    Temporary memory within one operator is not counted. Like an allocator, it fails before the operator has an effect:
    one that allocates its result changes nothing else.
    """

    def __init__(self, max_bytes: float = float("inf")) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.num_bytes = 0
        self.peak = 0
        self.num_failures = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        new = {id(s): s for t in tensors_in(result) if id(s := t.untyped_storage()) not in known | self.live.keys()}
        size = sum(storage.nbytes() for storage in new.values())
        if size and self.num_bytes + size > self.max_bytes:
            self.num_failures += 1
            raise torch.OutOfMemoryError(f"Tried to allocate {size} bytes beside {self.num_bytes}. {func}")
        for storage in new.values():
            self.count(storage)
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def free(_: object) -> None:
            del self.live[key]
            self.num_bytes -= size

        self.live[key] = weakref.ref(storage, free)
        self.num_bytes += size
        self.peak = max(self.peak, self.num_bytes)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
