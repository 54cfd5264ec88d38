"""Large pictures of noise with one small handwritten digit, and the tool that shows a part of them.

`configs/look_closer.yaml` names `train_rows`, `held_out_rows`, `Picture` and `seen_and_read`.
"""

from __future__ import annotations

from functools import cache
from io import BytesIO
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

QUESTION = "Which digit is in this picture?"
CELLS = [f"{column}{row}" for row in "1234" for column in "abcd"]
"""Names of the cells of a picture, row by row."""
CELL = 128
"""Side of a cell in pixels."""
PIXELS = 4 * CELL
"""Side of a picture."""
DIGIT = 50
"""Side of a digit."""
CROP = 64
"""Side of what `crop` shows: the middle of a cell."""
OFF_CENTRE = 6
"""Largest distance, to the right and down, between the middles of a digit and of its cell."""
NOISE = (70, 150)
"""Lowest and highest brightness of the background."""
GRAIN = 8
"""Side of a square of noise."""
SHOWN = 0.2
"""Reward of a completion that has seen the digit."""
NUM_TRAINING, NUM_HELD_OUT = 4096, 512


def train_rows() -> list[dict[str, Any]]:
    """Return the rows to train on."""
    return draw_rows(NUM_TRAINING, "train")


def held_out_rows() -> list[dict[str, Any]]:
    """Return rows with scans that are never trained on."""
    return draw_rows(NUM_HELD_OUT, "held-out")


def draw_rows(num_rows: int, name: str) -> list[dict[str, Any]]:
    """Return rows of one picture each, the same in every run; `name` seeds the random numbers and begins the ids.

    Rows of the name "held-out" have other scans than all other rows.
    """
    random, scans = Random(name), split(name == "held-out")
    return [{"id": f"{name}-{i:04d}", **draw_row(random, *random.choice(scans))} for i in range(num_rows)]


def split(held_out: bool) -> list[tuple[Any, str]]:
    """Return a quarter of the scans, which is held out, or the others, each with its label."""
    return [scan for i, scan in enumerate(load_scans()) if (i % 4 == 0) == held_out]


@cache
def load_scans() -> list[tuple[Any, str]]:
    """Return scikit-learn's 1,797 scans, as arrays of 8 x 8 pixels from 0 to 255, with their labels."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    scans = (digits.images * (255 / 16)).astype("uint8")
    return [(scan, str(label)) for scan, label in zip(scans, digits.target, strict=True)]


def draw_row(random: Random, scan: Any, label: str) -> dict[str, Any]:
    """Draw a scan in white near the middle of a cell."""
    import numpy as np
    from PIL import Image

    side = PIXELS // GRAIN
    noise = np.random.default_rng(random.randrange(2**32)).integers(*NOISE, (side, side), dtype="uint8")
    picture = Image.fromarray(noise).resize((PIXELS, PIXELS), Image.Resampling.NEAREST)
    digit = Image.fromarray(scan).resize((DIGIT, DIGIT), Image.Resampling.BILINEAR)
    cell = random.choice(CELLS)
    corner = [start + (CELL - DIGIT) // 2 + random.randint(-OFF_CENTRE, OFF_CENTRE) for start in place(cell)]
    picture.paste(255, (corner[0], corner[1]), digit)
    return {"prompt": QUESTION, "image": png(picture), "solution": label, "cell": cell}


def png(picture: Image.Image) -> bytes:
    """Return a picture as a file, so that rows take little memory."""
    file = BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def place(cell: str) -> tuple[int, int]:
    """Return the left and upper edge of a cell. Raises ValueError if there is no such cell."""
    row, column = divmod(CELLS.index(cell), 4)
    return column * CELL, row * CELL


def cropped(picture: Image.Image, cell: str) -> Image.Image:
    """Return the middle of a cell."""
    x, y = (start + (CELL - CROP) // 2 for start in place(cell))
    return picture.crop((x, y, x + CROP, y + CROP))


class Picture:
    """The picture of a row, of which the model can see parts in more pixels."""

    def reset(self, image: Image.Image, cell: str, **columns: Any) -> None:
        """Begin with the picture of a row, whose digit is in `cell`."""
        self.image = image
        self.target = cell
        self.seen: set[str] = set()

    def crop(self, cell: str) -> list[dict[str, Any]]:
        """Show the middle of a cell.

        Args:
            cell: A column from a to d and a row from 1 to 4, such as b3.
        """
        if cell not in CELLS:
            raise ValueError(f"there is no cell {cell}")
        self.seen.add(cell)
        return [{"type": "image", "image": cropped(self.image, cell)}]

    def get_reward(self) -> float:
        """Return a small reward if the digit has been seen."""
        return SHOWN if self.target in self.seen else 0.0


def seen_and_read(
    completions: list[str], turns: list[list[dict[str, Any]]], cell: list[str], solution: list[str], **_: Any
) -> list[float]:
    """Return 1 for a right answer after the digit has been seen. A guess is not rewarded."""
    return [
        float(answer == f"<answer>{digit}</answer>" and target in looked_at(some))
        for answer, some, target, digit in zip(completions, turns, cell, solution, strict=True)
    ]


def looked_at(turns: list[dict[str, Any]]) -> list[str]:
    """Return the cells that turns have asked for."""
    return [call["arguments"].get("cell") for turn in turns for call in turn["calls"]]
