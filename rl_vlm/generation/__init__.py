"""Rollout engines: requests in, groups of sampled completions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rl_vlm.types import Group, RolloutRequest, Sampling

if TYPE_CHECKING:
    from rl_vlm.policy import Policy


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from the current policy."""

    policy_version: int
    """Number of weight updates that the generator has seen."""

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """One group per request, in order, each of `sampling.num_generations` completions."""
        ...

    def sync(self, policy: Policy, version: int) -> int:
        """Take over the policy's weights after `version` updates; returns the bytes that were moved."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it generates no more."""
        ...
