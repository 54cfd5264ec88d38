"""Rollout engines: requests in, groups of sampled completions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rl_vlm.types import Group, RolloutRequest, Sampling


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from the current policy."""

    policy_version: int
    """Number of weight updates that the generator has seen; whoever updates the weights raises it."""

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """One group per request, in order, each of `sampling.num_generations` completions."""
        ...
