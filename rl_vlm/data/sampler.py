"""The order in which ranks draw rows: every row once per epoch, or by weight, for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rl_vlm.data.weighted import Share, weighted_epoch
from rl_vlm.errors import CheckpointError


class Draw(NamedTuple):
    """One prompt to generate from: `row` in pass `epoch` over the rows. With weights, passes count per source."""

    epoch: int
    row: int


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
