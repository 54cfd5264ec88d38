"""Collectives: communication between the ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


class Collectives:
    """One rank's view of all ranks. All ranks call each method together.

    This class is the view of a single rank. `Ranks` joins processes, and so overrides every method.
    """

    rank = 0
    world_size = 1
    is_main = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return element-wise sums over all ranks, computed in float64."""
        return list(values)

    def max(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over all ranks."""
        return list(values)

    def gather(self, values: list[T]) -> list[T]:
        """Return the lists of all ranks, concatenated by rank, on every rank."""
        return values

    def agree(self) -> AbstractContextManager[None]:
        """Raise an RLVLMError on every rank if the block raises it on any rank, so that no rank waits forever.

        All ranks must enter the block. Ranks that have left it wait as long as others make progress in it.
        """
        return nullcontext()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace a tensor's values by rank 0's values."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
