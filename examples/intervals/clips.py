"""Clips in which a handwritten digit is there for some seconds, as mp4 files.

`configs/intervals.yaml` names `train_rows` and `held_out_rows`. `shuffled_rows` are those of a control.
"""

from __future__ import annotations

from random import Random
from typing import Any

from examples.motion.clips import SIDE, frame, mp4, split

NUM_TRAINING, NUM_HELD_OUT = 2048, 512
QUESTION = "When is the digit there?"
SECONDS, FPS = 8, 2
"""Seconds of a clip, and frames per second."""
LENGTH = 2
"""Seconds that the digit is there. All intervals have this length, so that no constant answer pays well."""


def train_rows() -> list[dict[str, Any]]:
    """Return the rows to train on."""
    return draw_rows(NUM_TRAINING, "train")


def held_out_rows() -> list[dict[str, Any]]:
    """Return rows with scans that are never trained on."""
    return draw_rows(NUM_HELD_OUT, "held-out")


def shuffled_rows() -> list[dict[str, Any]]:
    """Return the held-out rows with their seconds in a random order."""
    return draw_rows(NUM_HELD_OUT, "held-out", shuffle=True)


def draw_rows(num_rows: int, name: str, shuffle: bool = False) -> list[dict[str, Any]]:
    """Return rows of one clip each, the same in every run; `name` seeds the random numbers and begins the ids.

    Rows of the name "held-out" have other scans than all other rows.
    """
    random, scans = Random(name), split(name == "held-out")
    rows = [draw_row(random, random.choice(scans), Random(i) if shuffle else None) for i in range(num_rows)]
    return [{"id": f"{name}-{i:04d}", **row} for i, row in enumerate(rows)]


def draw_row(random: Random, scan: Any, order: Random | None) -> dict[str, Any]:
    """Draw a digit that is in one place for `LENGTH` seconds from a whole second on. Shuffle seconds by `order`."""
    start = random.randrange(SECONDS - LENGTH + 1)
    place = random.randrange(SIDE), random.randrange(SIDE)
    shown = [scan if start <= second < start + LENGTH else scan * 0 for second in range(SECONDS)]
    if order is not None:
        order.shuffle(shown)
    frames = [frame(each, *place) for each in shown for _ in range(FPS)]
    return {"prompt": QUESTION, "video": mp4(frames, FPS), "solution": f"{start} to {start + LENGTH}"}
