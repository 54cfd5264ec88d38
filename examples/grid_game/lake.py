"""Gymnasium's frozen lake with the map of a row, small pictures, and a reward for each step.

`configs/grid_game.yaml` names it as `gymnasium:examples.grid_game.lake:TurnedLake-v0`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from examples.grid_game.maps import SIDE, distances

CELL = 16
"""Side of a cell in pixels. Gymnasium's own is 64, which takes 14 times as long to draw."""
NEARER = 0.2
"""Reward of a step that shortens the way to the goal, also of the last one. Other steps have 0, as have bad turns."""
HOLE = -0.2
"""Reward of a step into a hole."""


class TurnedLake(FrozenLakeEnv):
    """A frozen lake that is not slippery. A game ends at the goal or in a hole."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode, is_slippery=False)
        self.cell_size = (CELL, CELL)
        self.window_size = (CELL * SIDE, CELL * SIDE)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Begin at the start of the map `desc` in `options`, which also has the `limit` of steps."""
        columns = options or {}
        desc, self.left = tuple(columns["desc"]), columns["limit"]
        game = FrozenLakeEnv(desc=list(desc), is_slippery=False)
        self.desc, self.P, self.initial_state_distrib = game.desc, game.P, game.initial_state_distrib
        self.distances = {row * self.ncol + column: far for (row, column), far in distances(desc).items()}
        return super().reset(seed=seed)

    def step(self, a: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Take a step. Its reward is `HOLE` in a hole, `NEARER` if it shortens the way, or else 0."""
        before = self.distances[self.s]
        cell, _, is_over, _, info = super().step(a)
        self.left -= 1
        is_nearer = cell in self.distances and self.distances[cell] < before
        reward = NEARER if is_nearer else HOLE if is_over else 0.0
        return cell, reward, is_over, self.left == 0, info


gymnasium.register("TurnedLake-v0", entry_point=f"{__name__}:{TurnedLake.__name__}")
