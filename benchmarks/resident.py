"""Memory of this process: resident as Linux counts it, and held by tensors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SECONDS_BETWEEN_SAMPLES = 0.002


class Resident:
    """Growth of the resident memory since this was made, by stage, in bytes.

    Anonymous memory is that which no file backs. Pages of a checkpoint that is mapped into memory count as resident as
    well, but the system drops them if memory is short.
    """

    def __init__(self) -> None:
        gc.collect()
        self.baseline = resident_bytes()
        self.after: dict[str, int] = {}
        self.peaks: dict[str, dict[str, int]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note the anonymous memory after a block, and the peaks in the block, sampled every 2 ms."""
        samples, done = [resident_bytes()], threading.Event()

        def sample() -> None:
            while not done.wait(SECONDS_BETWEEN_SAMPLES):
                samples.append(resident_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield
        finally:
            done.set()
            sampler.join()
        gc.collect()
        self.after[name] = self.growth("anonymous", resident_bytes())
        self.peaks[name] = {kind: max(self.growth(kind, s) for s in samples) for kind in self.baseline}

    def growth(self, kind: str, now: dict[str, int]) -> int:
        return now[kind] - self.baseline[kind]


def resident_bytes() -> dict[str, int]:
    """Return the resident memory of this process: anonymous, and with mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split()[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return {"anonymous": sizes["RssAnon:"], "with files": sizes["RssAnon:"] + sizes["RssFile:"]}


def live_bytes() -> int:
    """Return the bytes of all tensors that Python can reach, and of their gradients."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return storage_bytes([*tensors, *gradients])


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of tensors, each counted once; of a DTensor, those of this rank's part."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
        if tensor.layout == torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def local_weights(policy: nn.Module) -> list[Tensor]:
    """Return the tensors in which this rank holds a policy's weights, or its part of them."""
    return [tensor for p in policy.parameters() for tensor in (p, getattr(p, "ds_tensor", p))]


def held_bytes(policy: nn.Module, adamw: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of this rank's weights, of DeepSpeed's copy of them that AdamW updates, and of its moments."""
    weights = local_weights(policy)
    updated = list(adamw.state)
    moments = [value for state in adamw.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {
        "weights": storage_bytes(weights),
        "copies": storage_bytes([*weights, *updated]) - storage_bytes(weights),
        "moments": storage_bytes(moments),
    }
