"""The order in which ranks draw rows: every row once per epoch, or by weight, for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_vlm.errors import CheckpointError


class Draw(NamedTuple):
    """One prompt to generate from: `row` in pass `epoch` over the rows. With weights, passes count per source."""

    epoch: int
    row: int


class Share(NamedTuple):
    """A source of a mixture."""

    num_rows: int
    weight: float


class PromptSampler:
    """The `prompts_per_step` draws of each optimizer step over all ranks, cut from one endless stream.

    The stream concatenates the permutations of the epochs. A step may span epochs, so no row is dropped.
    Rank r takes the r-th contiguous share of each step, so a step's rows do not depend on the number of ranks.

    Example, 5 rows unshuffled, 4 prompts per step over 2 ranks:

        stream   0 1 2 3 4 | 0 1 2 3 4 | …
        step 0   rank 0: rows 0 1      rank 1: rows 2 3
        step 1   rank 0: rows 4 0      rank 1: rows 1 2
    """

    def __init__(
        self,
        num_rows: int,
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        shares: Sequence[Share] = (),
    ) -> None:
        """`shares` are the sources of a mixture with weights. If empty, every row is drawn once per epoch."""
        if prompts_per_step % world_size:
            raise ValueError(f"prompts_per_step = {prompts_per_step} is not a multiple of {world_size} ranks")
        self.num_rows = num_rows
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.share = prompts_per_step // world_size
        self.shares = tuple(shares)
        self.cursor = 0

    def next_step(self) -> list[Draw]:
        """Draw this rank's `prompts_per_step / world_size` rows of the next optimizer step."""
        start = self.cursor + self.rank * self.share
        self.cursor += self.prompts_per_step
        return [self._draw(position) for position in range(start, start + self.share)]

    def next_window(self, num_steps: int) -> list[Draw]:
        """Draw this rank's rows of the next `num_steps` optimizer steps."""
        return [draw for _ in range(num_steps) for draw in self.next_step()]

    @property
    def epoch(self) -> float:
        """Return the number of passes over the data so far, as a fraction."""
        return self.cursor / self.num_rows

    def _draw(self, position: int) -> Draw:
        epoch, place = divmod(position, self.num_rows)
        if self.shares:
            return Draw(*weighted_epoch(self.shares, self.seed, epoch, self.shuffle)[place])
        return Draw(epoch, epoch_order(self.num_rows, self.seed, epoch)[place] if self.shuffle else place)

    def state_dict(self) -> dict[str, Any]:
        order = {"num_rows": self.num_rows, "seed": self.seed, "shuffle": self.shuffle}
        return {"cursor": self.cursor, **order, "shares": [list(share) for share in self.shares]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved cursor. Raises CheckpointError if the order of rows has changed."""
        saved = {"shares": []} | state  # checkpoints from before mixtures have no shares
        for name, present in self.state_dict().items():
            if name != "cursor" and saved[name] != present:
                raise CheckpointError(
                    f"The checkpoint drew its data with {name} = {saved[name]}, this run has {present}: the order of "
                    "rows would change. Resume with the same data, weights, seed and shuffling, or start a new run."
                )
        self.cursor = state["cursor"]


@lru_cache(maxsize=2)  # a step may span two epochs
def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Compute the permutation of `num_rows` rows in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()


@lru_cache(maxsize=2)  # a step may span two epochs
def weighted_epoch(shares: tuple[Share, ...], seed: int, epoch: int, shuffle: bool) -> list[tuple[int, int]]:
    """Return the draws of an epoch as (pass over the source, row). Passes count from 0, rows over all sources.

    Each source gets its share, and draws all its rows before it repeats any. An epoch has as many draws as there are
    rows. Draw k of a source (from 0) has the time (k + 1/2) / weight, and draws are made in the order of their times
    (Sainte-Laguë's method). So after any number of draws each source has had its share, in whole draws. Shuffling
    changes the order of an epoch's draws among sources, but not their numbers. A source goes through its rows again
    and again, each time in another order, and continues in the next epoch where it stopped.

    Example, 4 and 2 rows with weights 1 and 1, unshuffled: an epoch has 6 draws, 3 of each source.

        epoch 0   a0 b0 a1 b1 a2 b0
        epoch 1   a3 b1 a0 b0 a1 b1
    """
    weights = np.array([share.weight for share in shares], np.float64)
    num_draws = sum(share.num_rows for share in shares)
    counts = counts_after(weights, epoch * num_draws)
    sources = next_sources(weights, counts, num_draws)
    if shuffle:
        sources = np.random.default_rng([seed, epoch]).permutation(sources)
    firsts = np.cumsum([0, *(share.num_rows for share in shares)])
    draws = []
    for source in sources.tolist():
        round_, place = divmod(int(counts[source]), shares[source].num_rows)
        row = source_order(shares[source].num_rows, seed, source, round_)[place] if shuffle else place
        draws.append((round_, int(firsts[source]) + row))
        counts[source] += 1
    return draws


def counts_after(weights: NDArray[np.float64], num_draws: int) -> NDArray[np.int64]:
    """Return how many of the first `num_draws` draws are from each source.

    A count differs from the source's share by `len(weights)` at most, so only the last draws must be ordered.
    """
    least = np.maximum(np.floor(num_draws * weights / weights.sum()).astype(np.int64) - len(weights), 0)
    last = next_sources(weights, least, num_draws - int(least.sum()))
    return least + np.bincount(last, minlength=len(weights))


def next_sources(weights: NDArray[np.float64], counts: NDArray[np.int64], num_draws: int) -> NDArray[np.int64]:
    """Return the sources of the next draws, in order, if each source has had `counts` draws."""
    most = np.ceil(num_draws * weights / weights.sum()).astype(np.int64) + 3 * len(weights)
    sources = np.repeat(np.arange(len(weights)), most)
    times = [(first + np.arange(num) + 0.5) / weight for first, num, weight in zip(counts, most, weights, strict=True)]
    return sources[np.argsort(np.concatenate(times), kind="stable")[:num_draws]]


@lru_cache(maxsize=64)
def source_order(num_rows: int, seed: int, source: int, round_: int) -> list[int]:
    """Compute the permutation of a source's rows in one pass over them."""
    return np.random.default_rng([seed, round_, source + 1]).permutation(num_rows).tolist()
