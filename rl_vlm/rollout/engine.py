"""Rollout engines: requests in, groups of sampled completions out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import RolloutError
from rl_vlm.types import Group, RolloutRequest, Sampling


@runtime_checkable
class WeightSource(Protocol):
    """Gives the policy's weights to an engine that keeps its own copy."""

    sends_adapter: bool
    """True to send the adapter alone, False to send weights."""

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds a shard of the weights. If so, all ranks must join an all-gather."""
        return False

    def save_adapter(self, directory: Path) -> int:
        """Write the adapter in PEFT's format to a new or empty directory, and return its size in bytes."""
        ...

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight that training changes, unsharded, by its name in checkpoints."""
        ...

    def join_gathering(self) -> None:
        """Join the all-gather on a rank that sends no weights. Called once, instead of the methods above."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions from the current policy."""

    policy_version: int
    """Number of policy updates that the engine's weights include."""
    counters: Counter[str]
    """Number of events since the last read, by metric, such as `out_of_memory/rollout`."""

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate one group per request, in order, each of `sampling.num_generations` completions."""
        ...

    def sync(self, source: WeightSource, version: int) -> int:
        """Load the policy's weights after `version` updates, and return the number of bytes moved."""
        ...

    def sleep(self) -> bool:
        """Free memory of the trainer's device until the engine is next used. Return whether its weights are kept."""
        return True

    def close(self) -> None:
        """Free the engine's resources. It cannot generate afterwards."""


class TurnLost(RolloutError):
    """Nothing is left that can sample a turn with the last weights. A trajectory ends as a fault with it."""


@dataclass(frozen=True)
class Submitted:
    """A request that an engine works on in the background."""

    future: Future[Any]
    """Done when the engine has answered."""
    read: Callable[[Any], Group]

    def group(self) -> Group:
        """Wait for the answer and return the group. Raises TurnLost if none will come."""
        return self.read(self.future.result())


@runtime_checkable
class Session(Protocol):
    """Samples completions one by one, each as soon as it is submitted."""

    def submit(self, request: RolloutRequest) -> Submitted:
        """Begin to sample a request with one paused completion. It gets the tokens that `generate` would sample."""
        ...


@runtime_checkable
class ConcurrentEngine(Protocol):
    """A `RolloutEngine` that takes requests while it samples others."""

    def session(self, sampling: Sampling) -> AbstractContextManager[Session]:
        """Return the context of one rollout. Its end cancels requests that have not begun, and waits for the others."""
        ...


class SyncedEngine:
    """A rollout engine and the policy's weights to send to it, over all ranks."""

    def __init__(
        self,
        engine: RolloutEngine,
        weights: WeightSource,
        ranks: Ranks,
        gathered: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`gathered` returns the context for `generate`. All ranks open it together, then generate independently."""
        self.engine = engine
        self.gathered = gathered
        self.weights = weights
        self.ranks = ranks
        self.sent_version = -1
        """Version of the weights that the engine has, or -1 if none were sent or it has not kept them."""

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate one group per request, in order."""
        return self.engine.generate(requests, sampling)

    def take_counters(self) -> Counter[str]:
        """Return the engine's counters, and set them to 0."""
        counters = self.engine.counters.copy()
        self.engine.counters.clear()
        return counters

    def sync(self, version: int) -> int:
        """Send the policy's weights after `version` updates. Returns the number of bytes sent."""
        with self.ranks.agree(), stop.postponed():
            num_bytes = self.engine.sync(self.weights, version)
        self.sent_version = version
        return num_bytes

    def forget_syncs(self, version: int) -> None:
        """Forget later syncs than that of `version`. An engine that has slept since then stays without weights."""
        self.sent_version = min(version, self.sent_version)

    def sleep(self) -> None:
        """Free the engine's memory on the trainer's device. Weights that it does not keep are sent again."""
        if not self.engine.sleep():
            self.sent_version = -1

    def close(self) -> None:
        self.engine.close()
