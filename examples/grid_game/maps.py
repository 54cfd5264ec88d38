"""Maps of a frozen lake, and the reward function that shows how many games are won.

`configs/grid_game.yaml` names `train_rows`, `held_out_rows` and `solved`. A map has a start `S`, a goal `G`, ice `F`
and holes `H`, as Gymnasium writes it.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from random import Random
from typing import Any

PROMPT = "Which step?"
SIDE = 4
"""Cells of a side of a map."""
ICE = 0.8
"""Share of the cells that are ice, as in Gymnasium's random maps."""
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Rows and columns that a step goes, in the order of the numbers that Gymnasium gives to steps."""
LIMIT = 10
"""Steps of a held-out game."""
SPARE = 2
"""Steps of a game to train on, more than the shortest way has."""
NUM_TRAINING, NUM_HELD_OUT = 4096, 128

Map = tuple[str, ...]
Cell = tuple[int, int]


def train_rows() -> list[dict[str, Any]]:
    """Return the rows to train on. Games begin in any cell from which the goal can be reached."""
    held_out, random, rows = {alike(desc) for desc in held_out_maps()}, Random("train"), []
    while len(rows) < NUM_TRAINING:
        desc = draw_map(random)
        if alike(desc) not in held_out:
            begun, away = moved(desc, random)
            rows.append(row_of(f"train-{len(rows):04d}", begun, away + SPARE))
    return rows


def held_out_rows() -> list[dict[str, Any]]:
    """Return rows of maps that are never trained on, turned or not. Games begin in the corner opposite to the goal."""
    return [row_of(f"held-out-{i:04d}", desc, LIMIT) for i, desc in enumerate(held_out_maps())]


@cache
def held_out_maps() -> tuple[Map, ...]:
    """Return maps of which no two are the same, however they are turned."""
    random, found = Random("held-out"), {}
    while len(found) < NUM_HELD_OUT:
        desc = draw_map(random)
        found.setdefault(alike(desc), desc)
    return tuple(found.values())


def row_of(name: str, desc: Map, limit: int) -> dict[str, Any]:
    return {"id": name, "prompt": PROMPT, "desc": list(desc), "limit": limit}


def draw_map(random: Random) -> Map:
    """Draw a map with a way from a corner to the corner opposite, turned at random."""
    while True:
        cells = [["F" if random.random() < ICE else "H" for _ in range(SIDE)] for _ in range(SIDE)]
        cells[0][0], cells[-1][-1] = "S", "G"
        desc = tuple(map("".join, cells))
        if (0, 0) in distances(desc):
            return random.choice(turns(desc))


def moved(desc: Map, random: Random) -> tuple[Map, int]:
    """Return the map with its start in a random cell, and the number of steps from there to the goal."""
    (row, column), away = random.choice([(cell, far) for cell, far in distances(desc).items() if far])
    lines = [line.replace("S", "F") for line in desc]
    lines[row] = lines[row][:column] + "S" + lines[row][column + 1 :]
    return tuple(lines), away


def turns(desc: Map) -> list[Map]:
    """Return the eight ways to turn and mirror a map."""
    mirrored = tuple(map("".join, zip(*desc, strict=True)))
    both = [each[::step] for each in (desc, mirrored) for step in (1, -1)]
    return [tuple(line[::step] for line in each) for each in both for step in (1, -1)]


def alike(desc: Map) -> Map:
    """Return the same map for all ways to turn it."""
    return min(turns(desc))


def distances(desc: Map) -> dict[Cell, int]:
    """Return the number of steps to the goal, of each cell from which it can be reached."""
    (goal,) = [(row, line.index("G")) for row, line in enumerate(desc) if "G" in line]
    found, queue = {goal: 0}, deque([goal])
    while queue:
        row, column = cell = queue.popleft()
        for down, right in MOVES.values():
            near = row + down, column + right
            is_inside = min(near) >= 0 and max(near) < SIDE
            if is_inside and near not in found and desc[near[0]][near[1]] != "H":
                found[near] = found[cell] + 1
                queue.append(near)
    return found


def solved(turns: list[list[dict[str, Any]]], finish_reasons: list[str], **_: Any) -> list[float]:
    """Return 1 for each game that is over with a step that was worth something. This is a step to the goal."""
    games = zip(turns, finish_reasons, strict=True)
    return [float(why == "stop" and (some[-1]["reward"] or 0.0) > 0) for some, why in games]
