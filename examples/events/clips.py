"""Clips of a digit that vanishes, and of digits that appear one after the other, as mp4 files.

`configs/blinks.yaml` and `configs/order.yaml` name the functions without arguments, which return rows.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from examples.motion.clips import DIGIT, SIDE, frame, mp4, split

NUM_TRAINING, NUM_HELD_OUT = 2048, 512
NUM_FRAMES, FPS = 8, 4
"""Frames of a clip, and frames per second. Two frames become one token, so each event takes two."""
HOW_OFTEN = "How often does the digit vanish?"
COUNTS = ("never", "once", "twice", "thrice")
WHERE_FIRST = "In which corner is a digit first?"
CORNERS = {"northwest": (0, 0), "northeast": (1, 0), "southwest": (0, 1), "southeast": (1, 1)}
"""Column and line of each corner."""

Row = dict[str, Any]


def blinks_to_train() -> list[Row]:
    """Return the rows of the first question to train on."""
    return draw_rows(NUM_TRAINING, "train", draw_blinks)


def blinks_held_out() -> list[Row]:
    """Return rows of the first question with scans that are never trained on."""
    return draw_rows(NUM_HELD_OUT, "held-out", draw_blinks)


def order_to_train() -> list[Row]:
    """Return the rows of the second question to train on."""
    return draw_rows(NUM_TRAINING, "train", draw_order)


def order_held_out() -> list[Row]:
    """Return rows of the second question with scans that are never trained on."""
    return draw_rows(NUM_HELD_OUT, "held-out", draw_order)


def order_reversed() -> list[Row]:
    """Return the held-out rows of the second question with frames from the last to the first."""
    return draw_rows(NUM_HELD_OUT, "held-out", lambda random, scans: draw_order(random, scans, backwards=True))


def draw_rows(num_rows: int, name: str, draw: Callable[[Random, Any], Row]) -> list[Row]:
    """Return rows of one clip each, the same in every run. `name` seeds the random numbers and begins the ids."""
    random, scans = Random(name), split(name == "held-out")
    return [{"id": f"{name}-{i:04d}", **draw(random, scans)} for i in range(num_rows)]


def draw_blinks(random: Random, scans: Any) -> Row:
    """Draw a digit anywhere that is gone for up to three of the four pairs of frames."""
    scan, count = random.choice(scans), random.randrange(len(COUNTS))
    x, y = random.randrange(SIDE - DIGIT), random.randrange(SIDE - DIGIT)
    gone = random.sample(range(NUM_FRAMES // 2), count)
    frames = [frame(scan * (i // 2 not in gone), x, y) for i in range(NUM_FRAMES)]
    return {"prompt": HOW_OFTEN, "video": mp4(frames, FPS), "solution": COUNTS[count]}


def draw_order(random: Random, scans: Any, backwards: bool = False) -> Row:
    """Draw a digit in one corner in the first half of a clip, and another in another corner in the second half."""
    corners = random.sample([*CORNERS], 2)
    placed = [(place_in(random, corner), random.choice(scans)) for corner in corners]
    halves = [frame(scan, *place) for place, scan in placed]
    frames = [halves[i * 2 // NUM_FRAMES] for i in range(NUM_FRAMES)]
    return {"prompt": WHERE_FIRST, "video": mp4(frames[::-1] if backwards else frames, FPS), "solution": corners[0]}


def place_in(random: Random, corner: str) -> tuple[int, int]:
    """Return a place of a digit, x and y, within a corner."""
    half, room = SIDE // 2, SIDE // 2 - DIGIT + 1
    column, line = CORNERS[corner]
    return half * column + random.randrange(room), half * line + random.randrange(room)
