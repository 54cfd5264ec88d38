"""Bytes that collectives of torch.distributed move, whoever calls them: DDP's reducer, DeepSpeed or FSDP2."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NOT_COUNTED = {"barrier", "monitored_barrier_", "wait_tensor", "check_for_nan"}


class CountTraffic(TorchDispatchMode):
    """Count the bytes of each kind of collective in this context.

    Every collective is an operator of the namespace `c10d`, or `_c10d_functional`, that passes through the dispatcher,
    also if C++ code calls it. The payload of one is the unsharded tensor: the input of a reduction or a broadcast, and
    the output of an all-gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.payloads: Counter[str] = Counter()
        """Bytes of each kind, such as `allreduce_`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional") and name not in NOT_COUNTED:
            self.payloads[name] += max(num_bytes(value) for value in (*args, result))
        return result

    def sent(self, world_size: int) -> float:
        """Return the bytes that a rank sends if collectives run on a ring, as a mean over ranks.

        Each rank sends (N - 1) / N of a payload, and twice that in an all-reduce, which is a reduce-scatter and an
        all-gather.
        """
        passes = sum(size * (2 if is_all_reduce(name) else 1) for name, size in self.payloads.items())
        return passes * (world_size - 1) / world_size


def is_all_reduce(name: str) -> bool:
    return name.replace("_", "").startswith("allreduce")


def num_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a value."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
