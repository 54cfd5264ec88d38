"""Answers with a box, for tiny models: one token per number, and vectors in the order of numbers.

An answer is `{"bbox_2d": [x1, y1, x2, y2]}`, in thousandths of the image's sides, as Qwen3-VL writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

STEP = 50
"""Coordinates of an answer are multiples of this."""
OPENING, BETWEEN, CLOSING = '{"bbox_2d": [', ", ", "]}"
NUMBERS = tuple(f"{number}{end}" for number in range(0, 1001, STEP) for end in (BETWEEN, CLOSING))
BOX_TOKENS = (OPENING, *NUMBERS)
"""If each of these is one token, an answer has six tokens with its end."""
FREQUENCIES = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Of the waves in the vectors of numbers: half waves from 0 to 1000."""


def box_answer(box: tuple[float, float, float, float]) -> str:
    """Return the answer that gives a box, in shares of the image's sides."""
    return OPENING + BETWEEN.join(str(round(number * 1000 / STEP) * STEP) for number in box) + CLOSING


def random_boxes(sides: tuple[float, float], seed: int) -> Iterator[str]:
    """Yield answers with square boxes of random place and size, for ever. They say nothing of any image.

    `sides` are the smallest and the largest side, as shares of the image's. Boxes are somewhat denser at the image's
    edges, so that the most likely one is not in the middle, where it would overlap with many objects.
    """
    random = Random(seed)
    while True:
        side = random.uniform(*sides)
        x, y = ((1 - side) * random.betavariate(0.7, 0.7) for _ in range(2))
        yield box_answer((x, y, x + side, y + side))


def order_numbers(directory: Path, seed: int) -> None:
    """Overwrite the vectors of `NUMBERS` in a checkpoint by sums of waves. Numbers that are near have similar vectors.

    A model that has read text has such vectors.
    """
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    generator = torch.Generator().manual_seed(seed)
    frequencies = torch.tensor(FREQUENCIES)
    weakening = frequencies.clamp(min=1).sqrt()
    for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        size = table.std().item()
        sines, cosines = 1.5 * size * torch.randn(2, len(FREQUENCIES), table.shape[1], generator=generator)
        kinds = size * torch.randn(2, table.shape[1], generator=generator)
        for name in NUMBERS:
            angles = torch.pi * frequencies * int(name.rstrip(BETWEEN + CLOSING)) / 1000
            waves = (angles.sin() / weakening) @ sines + (angles.cos() / weakening) @ cosines
            row = tokenizer.convert_tokens_to_ids(name)
            table.data[row] = waves + kinds[int(name.endswith(CLOSING))] + 0.2 * table.data[row]
    model.save_pretrained(directory)
