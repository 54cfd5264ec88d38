"""Training data from which nothing can be learned about the held-out digits."""

import numpy as np
from PIL import Image

from examples.digits.digits import train_rows


def permuted_answers() -> list[dict]:
    """The training rows with the gold answers of other rows."""
    rows = train_rows()
    order = np.random.default_rng(0).permutation(len(rows))
    return [{**row, "solution": rows[other]["solution"]} for row, other in zip(rows, order, strict=True)]


def shuffled_pixels() -> list[dict]:
    """The training rows with every pixel taken from the same place of another image, a different one for each pixel."""
    rows = train_rows()
    pixels = np.stack([np.asarray(row["image"]) for row in rows]).reshape(len(rows), -1)
    pixels = np.random.default_rng(0).permuted(pixels, axis=0).reshape(len(rows), 8, 8)
    return [{**row, "image": Image.fromarray(image)} for row, image in zip(rows, pixels, strict=True)]
