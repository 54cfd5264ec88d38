"""Count the bytes that fake tensors hold, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveBytes(TorchDispatchMode):
    """A `PeakCounter` of fake tensors. Each storage counts while it lives, with constant work per operator."""

    meaning = "fake tensors"

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        """Bytes of each live storage, by its address."""
        self.now = 0
        self.peak = 0
        """Peak bytes since `restart`."""
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.is_paused or isinstance(out, torch.device):
            return out
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, FakeTensor):
                self.add(tensor)
        return out

    def add(self, tensor: FakeTensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage: Any = tensor.untyped_storage()
        if storage._cdata in self.sizes or tensor.fake_device.type == "meta":
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, address: int) -> None:
        self.now -= self.sizes.pop(address)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore tensors that are made in this context."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def restart(self) -> None:
        """Reset the peak to the bytes that are held now."""
        self.peak = self.now

    def read(self) -> int:
        """Return the peak bytes since `restart`."""
        return self.peak
