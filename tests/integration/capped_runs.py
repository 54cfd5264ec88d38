"""Training runs whose memory is capped in one stage of one step, after a run without a cap was measured."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.ddp import DDP
from rl_vlm.model.policy import Policy
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.run.run import Run

STAGES = {
    "forward": (Policy, "forward"),
    "backward": (DDP, "backward"),
    "update": (DDP, "reserve_update"),
    "rollout": (HFEngine, "generate_batch"),
}

UPDATES_CAPPED = 1
"""Attempts to reserve memory for an update that are capped: one that is repeated has no smaller batch to choose."""


@dataclass(frozen=True)
class Range:
    """The bytes of tensors in a stage of a step: least at its begin, and most within it."""

    start: int
    peak: int

    def at(self, share: float) -> int:
        return round(self.start + share * (self.peak - self.start))


@dataclass
class Trained:
    """What a run did."""

    ranges: dict[tuple[str, int], Range] = field(default_factory=dict)
    """By stage and step. A first update makes the moments."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Those of each update, over all ranks."""
    num_failures: int = 0


def train_capped(config: RunConfig, stage: str = "", step: int = 0, max_bytes: float = float("inf")) -> Trained:
    """Train with at most `max_bytes` of tensors in a stage of a step, counted from 1.

    In the stage `update` only the first `UPDATES_CAPPED` attempts are.
    """
    trained, cap = Trained(), MemoryCap()

    def limited(name: str, owner: type, method: str) -> Any:
        function = getattr(owner, method)

        def run_limited(*arguments: Any, **named: Any) -> Any:
            now = run.progress.global_step + 1
            is_capped = (name, now) == (stage, step) and not (name == "update" and cap.num_failures == UPDATES_CAPPED)
            before, cap.peak, cap.max_bytes = cap.num_bytes, cap.num_bytes, max_bytes if is_capped else float("inf")
            try:
                return function(*arguments, **named)
            finally:
                cap.max_bytes = float("inf")
                found = trained.ranges.get((name, now), Range(before, cap.peak))
                trained.ranges[name, now] = Range(min(found.start, before), max(found.peak, cap.peak))

        return mock.patch.object(owner, method, run_limited)

    with ExitStack() as opened:
        for name, place in STAGES.items():
            opened.enter_context(limited(name, *place))
        opened.enter_context(recorded_gradients(trained.gradients))
        opened.enter_context(cap)
        run = Run(config)
        run.run()
        run.close()
    trained.num_failures = cap.num_failures
    return trained


@contextmanager
def recorded_gradients(found: list[dict[str, Tensor]]) -> Iterator[None]:
    """Append the gradients of each update, before they are clipped."""
    update = DDP.update

    def record(strategy: DDP, loss_is_finite: bool) -> tuple[float, bool]:
        parameters = dict(strategy.policy.named_parameters())
        found.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        return update(strategy, loss_is_finite)

    with mock.patch.object(DDP, "update", record):
        yield


def largest_difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest ‖g − g′‖ / ‖g′‖ of any tensor whose gradient is more than a rounding error."""
    assert gradients.keys() == expected.keys()
    floor = 1e-6 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    return max(float((gradients[n] - g).norm() / g.norm()) for n, g in expected.items() if g.norm() > floor)


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
