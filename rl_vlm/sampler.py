"""Which rows a rank draws next: every row once per epoch, whatever the number of ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rl_vlm.errors import CheckpointError


class Draw(NamedTuple):
    """One prompt to generate from: `row` in the order of epoch `epoch`, both from 0."""

    epoch: int
    row: int


class PromptSampler:
    """The `prompts_per_step` draws of each optimizer step over all ranks, cut from one endless stream.

    The stream is the epochs' permutations one after the other. A step may span epochs, so no row is dropped.
    Rank r takes the r-th contiguous share of each step: what a step draws does not depend on the number of ranks.

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
    ) -> None:
        if prompts_per_step % world_size:
            raise ValueError(f"prompts_per_step = {prompts_per_step} is not a multiple of {world_size} ranks")
        self.num_rows = num_rows
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.share = prompts_per_step // world_size
        self.cursor = 0

    def next_step(self) -> list[Draw]:
        """This rank's draws of the next optimizer step, `prompts_per_step / world_size` of them."""
        start = self.cursor + self.rank * self.share
        self.cursor += self.prompts_per_step
        return [self._draw(position) for position in range(start, start + self.share)]

    def next_window(self, num_steps: int) -> list[Draw]:
        """This rank's draws of the next `num_steps` optimizer steps."""
        return [draw for _ in range(num_steps) for draw in self.next_step()]

    @property
    def epoch(self) -> float:
        """Passes over the data that all draws so far amount to."""
        return self.cursor / self.num_rows

    def _draw(self, position: int) -> Draw:
        epoch, place = divmod(position, self.num_rows)
        return Draw(epoch, epoch_order(self.num_rows, self.seed, epoch)[place] if self.shuffle else place)

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "num_rows": self.num_rows, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor. Raises CheckpointError if the stream is not the one that was saved."""
        for name in ("num_rows", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise CheckpointError(
                    f"The checkpoint drew its data with {name} = {state[name]}, this run has {getattr(self, name)}: "
                    "the order of rows would change. Resume with the same data, seed and shuffling, or start a new run."
                )
        self.cursor = state["cursor"]


@lru_cache(maxsize=2)  # a step spans two epochs at their seam
def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """The permutation of `num_rows` rows that an epoch follows."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()
