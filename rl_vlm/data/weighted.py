"""Draws of a mixture with weights. Each source gets its share, and draws all its rows before it repeats any.

An epoch has as many draws as there are rows. Draw k of a source (from 0) has the time (k + 1/2) / weight, and draws are
made in the order of their times (Sainte-Laguë's method). So after any number of draws each source has had its share, in
whole draws. Shuffling changes the order of an epoch's draws among sources, but not their numbers. A source goes through
its rows again and again, each time in another order, and continues in the next epoch where it stopped.

Example, 4 and 2 rows with weights 1 and 1, unshuffled: an epoch has 6 draws, 3 of each source.

    epoch 0   a0 b0 a1 b1 a2 b0
    epoch 1   a3 b1 a0 b0 a1 b1
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Share(NamedTuple):
    """A source of a mixture."""

    num_rows: int
    weight: float


@lru_cache(maxsize=2)  # a step may span two epochs
def weighted_epoch(shares: tuple[Share, ...], seed: int, epoch: int, shuffle: bool) -> list[tuple[int, int]]:
    """Return the draws of an epoch as (pass over the source, row). Passes count from 0, rows over all sources."""
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
