"""Collectives: communication between the ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar, runtime_checkable

import torch

T = TypeVar("T")


@runtime_checkable
class Collectives(Protocol):
    """One rank's view of all ranks. All ranks call each method together."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_main(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return element-wise sums over all ranks."""
        ...

    def max(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over all ranks."""
        ...

    def gather(self, values: list[T]) -> list[T]:
        """Return the lists of all ranks, concatenated by rank."""
        ...

    def agree(self) -> AbstractContextManager[None]:
        """Raise an RLVLMError on every rank if the block raises it on any rank."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace a tensor's values by rank 0's values."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        ...


class SingleRank:
    """`Collectives` of one rank, for work without other ranks. It joins no processes."""

    rank = 0
    world_size = 1
    is_main = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def max(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def gather(self, values: list[T]) -> list[T]:
        return values

    def agree(self) -> AbstractContextManager[None]:
        return nullcontext()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Keep the values."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Keep the values."""
