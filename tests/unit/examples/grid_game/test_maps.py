"""The grid game's maps and rewards."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from examples.grid_game.maps import alike, distances, draw_map, held_out_maps, held_out_rows, moved, solved, train_rows

DOCUMENTED = ("SFFF", "FHFH", "FFFH", "HFFG")
"""The map of Gymnasium's documentation."""


def test_distances_go_around_holes():
    found = distances(DOCUMENTED)
    assert (found[0, 0], found[2, 0], found[3, 3], found[0, 3]) == (6, 4, 0, 5)
    assert not {(1, 1), (1, 3), (2, 3), (3, 0)} & set(found)


def test_maps_are_the_same_however_they_are_turned():
    turned = ("SFFH", "FHFF", "FFFF", "FHHG")  # rows and columns exchanged
    assert alike(turned) == alike(DOCUMENTED)
    assert alike(("HFFS", "FFHF", "FFFF", "GHHF")) == alike(DOCUMENTED)
    assert alike(("SFFF", "FFFH", "FFFH", "HFFG")) != alike(DOCUMENTED)


def test_start_and_goal_are_in_opposite_corners_and_every_corner_has_the_goal():
    random, corners = Random(0), Counter()
    for _ in range(400):
        cells = "".join(draw_map(random))
        goal = cells.index("G")
        assert cells.index("S") == 15 - goal
        corners[goal] += 1
    assert set(corners) == {0, 3, 12, 15}
    assert min(corners.values()) > 60


def test_a_moved_start_leaves_a_way_to_the_goal():
    random = Random(0)
    for _ in range(50):
        desc, away = moved(DOCUMENTED, random)
        cells = "".join(desc)
        assert (cells.count("S"), cells.count("G"), cells.count("H")) == (1, 1, 4)
        assert distances(desc)[divmod(cells.index("S"), 4)] == away > 0


def test_held_out_maps_are_never_trained_on():
    held_out, trained = ({alike(tuple(row["desc"])) for row in rows()} for rows in (held_out_rows, train_rows))
    assert len(held_out) == len(held_out_maps()) == 128
    assert not {without_start(desc) for desc in held_out} & {without_start(desc) for desc in trained}


def without_start(desc: tuple[str, ...]) -> tuple[str, ...]:
    return alike(tuple(line.replace("S", "F") for line in desc))


def test_games_that_end_at_the_goal_are_solved():
    games = {"stop": [[0.2, 0.2], [0.2], [0.2, -0.2]], "turns": [[0.2]], "length": [[None], [0.2, None]]}
    turns = [[{"reward": reward} for reward in game] for some in games.values() for game in some]
    why = [reason for reason, some in games.items() for _ in some]
    assert solved(turns, why) == [1, 1, 0, 0, 0, 0]


def test_steps_are_rewarded():
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("pygame")
    game = gymnasium.make("examples.grid_game.lake:TurnedLake-v0", render_mode="rgb_array")
    row = {"desc": ["SFFF", "FHFH", "FFFH", "HFFG"], "limit": 10}
    game.reset(options=row)
    # down, up, against the edge, down, down, right, right, down, right
    outcomes = [game.step(step)[1:3] for step in (1, 3, 0, 1, 1, 2, 2, 1, 2)]
    assert outcomes == [(r, False) for r in (0.2, 0.0, 0.0, 0.2, 0.2, 0.2, 0.2, 0.2)] + [(0.2, True)]
    game.reset(options=row)
    assert [game.step(step)[1:4] for step in (2, 1)] == [(0.2, False, False), (-0.2, True, False)]
    game.reset(options=row | {"limit": 2})
    assert [game.step(step)[1:4] for step in (2, 0)] == [(0.2, False, False), (0.0, False, True)]


def test_pictures_show_the_map_of_the_row():
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("pygame")
    game = gymnasium.make("examples.grid_game.lake:TurnedLake-v0", render_mode="rgb_array")

    def cells(*desc: str) -> np.ndarray:
        game.reset(options={"desc": desc, "limit": 10})
        return game.render().reshape(4, 16, 4, 16, 3).transpose(0, 2, 1, 3, 4)

    one, other = cells("SFFF", "FHFH", "FFFH", "HFFG"), cells("SFFF", "FFFH", "FFFH", "HFFG")
    differ = (one != other).any((2, 3, 4))
    assert [tuple(map(int, cell)) for cell in np.argwhere(differ)] == [(1, 1)]
