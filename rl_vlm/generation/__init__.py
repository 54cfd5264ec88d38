"""Rollout engines: requests in, groups of sampled completions out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from rl_vlm.types import Group, RolloutRequest, Sampling


@runtime_checkable
class WeightSource(Protocol):
    """What an engine with weights of its own takes over from the policy."""

    sends_adapter: bool
    """Whether the engine gets the adapter alone; otherwise it gets weights."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the weights, which all ranks gather together."""
        ...

    def save_adapter(self, directory: Path) -> int:
        """Write the adapter as PEFT does, into a new or empty directory; returns its bytes."""
        ...

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight that training moves, whole and by its name in checkpoints."""
        ...

    def join_gathering(self) -> None:
        """What a rank that sends nothing calls, once, instead of the others: its shards are needed."""
        ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from the current policy."""

    policy_version: int
    """Number of weight updates that the generator has seen."""

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """One group per request, in order, each of `sampling.num_generations` completions."""
        ...

    def sync(self, source: WeightSource, version: int) -> int:
        """Take over the policy's weights after `version` updates; returns the bytes that were moved."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it generates no more."""
        ...
