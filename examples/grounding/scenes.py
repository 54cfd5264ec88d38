"""Scenes of three coloured shapes, drawn on the spot, and questions for the box of one of them.

`configs/grounding.yaml` names `train_rows` and `held_out_rows`.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}
SHAPES = ("square", "circle", "triangle")
BACKGROUND = (120, 120, 120)
QUESTION = "Where is the {}?"

NUM_OBJECTS = 3
SIDES = (0.22, 0.38)
"""Smallest and largest side of an object's box, as shares of the image's side."""
PIXELS = 64
"""Side of an image."""
SMOOTHING = 4
"""Images are drawn this many times larger and then reduced, so that edges between pixels show."""
NUM_TRAINING, NUM_HELD_OUT = 8192, 256

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 in pixels of the image."""


def train_rows() -> list[dict[str, Any]]:
    """Return the rows to train on."""
    return draw_rows(NUM_TRAINING, "train")


def held_out_rows() -> list[dict[str, Any]]:
    """Return the rows that are never trained on."""
    return draw_rows(NUM_HELD_OUT, "held-out")


def draw_rows(num_rows: int, name: str) -> list[dict[str, Any]]:
    """Return rows of one scene each, the same in every run; `name` seeds the random numbers and begins the ids."""
    random = Random(name)
    return [{"id": f"{name}-{i:04d}", **draw_row(random)} for i in range(num_rows)]


def draw_row(random: Random) -> dict[str, Any]:
    """Draw a scene of objects of different colours, and ask for one of them."""
    names = [f"{colour} {random.choice(SHAPES)}" for colour in random.sample([*COLOURS], NUM_OBJECTS)]
    boxes = random_boxes(random)
    return {
        "prompt": QUESTION.format(names[0]),
        "image": draw_scene(dict(zip(names, boxes, strict=True))),
        "solution": list(boxes[0]),
        "object": names[0],
    }


def random_boxes(random: Random) -> list[Box]:
    """Return real-valued square boxes in an image, none of which overlap."""
    boxes: list[Box] = []
    while len(boxes) < NUM_OBJECTS:
        side = random.uniform(*SIDES) * PIXELS
        x, y = (random.uniform(0, PIXELS - side) for _ in range(2))
        box = (x, y, x + side, y + side)
        if not any(overlap(box, other) for other in boxes):
            boxes.append(box)
    return boxes


def overlap(box: Box, other: Box) -> bool:
    """Return whether two boxes share any area."""
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def draw_scene(objects: dict[str, Box]) -> Image.Image:
    """Draw objects, given as names such as "red square" with their boxes."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (PIXELS * SMOOTHING, PIXELS * SMOOTHING), BACKGROUND)
    canvas = ImageDraw.Draw(image)
    for name, box in objects.items():
        colour, shape = name.split()
        x1, y1, x2, y2 = (number * SMOOTHING for number in box)
        x2, y2 = x2 - 1, y2 - 1  # PIL fills the last pixel, too
        if shape == "square":
            canvas.rectangle((x1, y1, x2, y2), COLOURS[colour])
        elif shape == "circle":
            canvas.ellipse((x1, y1, x2, y2), COLOURS[colour])
        else:
            canvas.polygon([((x1 + x2) / 2, y1), (x2, y2), (x1, y2)], COLOURS[colour])
    return image.reduce(SMOOTHING)
