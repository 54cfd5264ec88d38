"""Tasks of new projects: rows that are the same in every project. Pictures are drawn with PIL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS = 64
"""Side of a picture."""
SMOOTHING = 4
"""Pictures are drawn this many times larger and then reduced, so that edges between pixels show."""
GREY, BLACK, RED, BLUE = (120, 120, 120), (20, 20, 20), (220, 30, 30), (30, 30, 220)

RADIUS = 6.0
"""Radius of a dot, in pixels."""
MOST_DOTS = 6
SIDES = (0.25, 0.45)
"""Smallest and largest side of an object to find, as shares of the picture's side."""

CELLS = 4
"""Cells along a side of the game's board."""
NUM_ROWS = {"train": 1024, "test": 256}
NUM_GAMES = {"train": 192, "test": 48}
"""All pairs of different cells."""

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 as shares of the picture's sides."""


@dataclass(frozen=True)
class Task:
    """A kind of project."""

    summary: str
    prompt: str
    function: str
    """Name of the function that shows the score."""
    expect: str
    minutes: str
    draw: Callable[[str], list[dict[str, Any]]]
    """Returns the columns of the rows to train on, `train`, or of the held-out ones, `test`."""
    num_rows: dict[str, int]
    part: str = "a reward"
    """The part of a project that is neither rows nor settings."""

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return rows, some with a PIL image. `name` begins their ids."""
        columns = self.draw(name)
        return [{"id": f"{name}-{i:04d}", "prompt": self.prompt, **row} for i, row in enumerate(columns)]


def pictures(draw: Callable[[Random], tuple[Image, Any]], name: str) -> list[dict[str, Any]]:
    """Return a picture and its solution for each row. `name` seeds the random numbers."""
    random = Random(name)
    return [dict(zip(("image", "solution"), draw(random), strict=True)) for _ in range(NUM_ROWS[name])]


def games(name: str) -> list[dict[str, Any]]:
    """Return the cells where games start, and their goals. No two games are the same, also of the two names."""
    cells = list(product(range(CELLS), repeat=2))
    pairs = [{"start": list(start), "goal": list(goal)} for start, goal in product(cells, cells) if start != goal]
    Random("games").shuffle(pairs)
    return pairs[: NUM_GAMES["train"]] if name == "train" else pairs[NUM_GAMES["train"] :]


def draw_dots(random: Random) -> tuple[Image, str]:
    """Draw dots that do not touch, and return their number."""
    centres: list[tuple[float, float]] = []
    number = random.randint(1, MOST_DOTS)
    while len(centres) < number:
        x, y = (random.uniform(RADIUS, PIXELS - RADIUS) for _ in range(2))
        if all((x - a) ** 2 + (y - b) ** 2 > (2.2 * RADIUS) ** 2 for a, b in centres):
            centres.append((x, y))
    boxes = [((x - RADIUS) / PIXELS, (y - RADIUS) / PIXELS, (x + RADIUS) / PIXELS, (y + RADIUS) / PIXELS)
             for x, y in centres]  # fmt: skip
    return picture([("ellipse", box, BLACK) for box in boxes]), str(number)


def draw_square(random: Random) -> tuple[Image, list[int]]:
    """Draw a red square and a blue circle, and return the square's box in thousandths of the picture's sides."""
    square, circle = random_box(random), random_box(random)
    while overlap(square, circle):
        square, circle = random_box(random), random_box(random)
    image = picture([("rectangle", square, RED), ("ellipse", circle, BLUE)])
    return image, [round(1000 * number) for number in square]


def random_box(random: Random) -> Box:
    """Return a square box of random place and size."""
    side = random.uniform(*SIDES)
    x, y = (random.uniform(0, 1 - side) for _ in range(2))
    return x, y, x + side, y + side


def overlap(box: Box, other: Box) -> bool:
    """Return whether two boxes share any area."""
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def picture(shapes: list[tuple[str, Box, tuple[int, int, int]]]) -> Image:
    """Draw shapes on grey. Each has the name of a method of PIL's ImageDraw, a box and a colour."""
    from PIL import Image, ImageDraw

    side = PIXELS * SMOOTHING
    image = Image.new("RGB", (side, side), GREY)
    canvas = ImageDraw.Draw(image)
    for name, (x1, y1, x2, y2), colour in shapes:
        getattr(canvas, name)((side * x1, side * y1, side * x2 - 1, side * y2 - 1), colour)  # PIL fills the last pixel
    return image.reduce(SMOOTHING)


TASKS = {
    "answer": Task(
        "a number in <answer> tags: how many dots does a picture have?",
        "How many dots are there? Put the number in <answer> tags.",
        "right",
        "a share of right answers on data/test.jsonl from about 0.17, which is chance, to above 0.90.",
        "about 2 minutes",
        partial(pictures, draw_dots),
        NUM_ROWS,
    ),
    "box": Task(
        "a box around an object: where is the red square?",
        'Where is the red square? Answer with {"bbox_2d": [x1, y1, x2, y2]}, in thousandths of the sides.',
        "overlap",
        "a mean overlap on data/test.jsonl from below 0.15 to above 0.50. The best constant box has 0.18.",
        "about 3 minutes",
        partial(pictures, draw_square),
        NUM_ROWS,
    ),
    "environment": Task(
        "a game of several turns, with a picture in each: walk to the goal",
        "Which step?",
        "reached",
        "a share of games that reach the goal on data/test.jsonl from below 0.25 to above 0.90.",
        "about 2 minutes",
        games,
        NUM_GAMES,
        "an environment with its tests",
    ),
}
