"""A Qwen3-VL of 0.6 million parameters that looks at a random cell and answers with a random digit.

`configs/look_closer.yaml` names `starting_model`. It knows how to write a call and an answer, from a short supervised
warm-up on random cells and random digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

from examples.look_closer import scenes
from examples.look_closer.scenes import CELLS, QUESTION, Picture, cropped, draw_rows
from rl_vlm.config.schema import DataConfig
from rl_vlm.data.tool_calls import introduction_of, schema_of
from rl_vlm.tiny.cached import cached_model
from rl_vlm.tiny.family import Resolution
from rl_vlm.tiny.warm_up import Turns, random_answers, warm_up

RESOLUTION = Resolution(side=16, tokens_per_side=1)
"""An image is a single token."""
MEAN, SPREAD = 0.43, 0.12
"""Brightness that the processor subtracts and divides by. They are those of these pictures, so that a digit shows."""
OPENING, CLOSING = '<tool_call>{"name": "crop", "arguments": {"cell": "', '"}}</tool_call>'
NUM_IMAGES = 64
"""Number of pictures in the warm-up."""
NUM_STEPS = 100
"""Steps of the warm-up."""
DATA = DataConfig(dataset_name="examples.look_closer.scenes:train_rows", max_pixels=RESOLUTION.side**2)


def tools() -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools."""
    return [schema_of(Picture().crop)]


@cached_model(scenes)
def starting_model(directory: Path, seed: int) -> None:
    """Write a model that looks at one cell, and then answers `<answer>d</answer>`, both at random."""
    build(directory, seed)
    warm_up(directory, DATA, random_looks(seed), tools=tools(), num_steps=NUM_STEPS, num_images=NUM_IMAGES)


@cached_model(scenes)
def answering_model(directory: Path, seed: int) -> None:
    """Write the model of the control without a tool: it answers `<answer>d</answer>` at random."""
    build(directory, seed)
    warm_up(
        directory, DATA, random_answers([f"<answer>{digit}</answer>" for digit in range(10)], seed), num_steps=NUM_STEPS
    )


def build(directory: Path, seed: int) -> None:
    """Write a model with random weights. The text that describes the tool is one token."""
    from rl_vlm.tiny.build import build_tiny
    from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS

    observed = ("<tool_response>\n", "\n</tool_response>")
    words = (introduction_of(tools()), *observed, OPENING, CLOSING, *CELLS, "<answer>", "</answer>")
    build_tiny(
        "qwen3_vl", directory, corpus=(*DEFAULT_CORPUS, QUESTION), whole_tokens=words, initializer_range=0.1,
        resolution=RESOLUTION, pixels=(MEAN, SPREAD), seed=seed,
    )  # fmt: skip


def random_looks(seed: int) -> Iterator[Turns]:
    """Yield a call with a random cell, what it shows, and an answer with a random digit, for ever.

    They are of the first `NUM_IMAGES` rows, in turn.
    """
    from PIL import Image

    random = Random(seed)
    pictures = [Image.open(BytesIO(row["image"])).convert("RGB") for row in draw_rows(NUM_IMAGES, "train")]
    while True:
        for picture in pictures:
            cell = random.choice(CELLS)
            yield [f"{OPENING}{cell}{CLOSING}", cropped(picture, cell), f"<answer>{random.randrange(10)}</answer>"]
