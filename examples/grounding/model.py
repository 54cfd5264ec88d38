"""A Qwen3-VL of 0.7 million parameters that answers with a box of random place and size, whatever its image shows.

`configs/grounding.yaml` names `starting_model`. It knows the form of an answer, the sizes that boxes have and the order
of numbers, from a short supervised warm-up on random boxes and from the vectors that numbers begin with.
"""

from __future__ import annotations

from pathlib import Path

from examples.grounding import scenes
from examples.grounding.scenes import COLOURS, QUESTION, SHAPES, SIDES
from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.boxes import BOX_TOKENS, order_numbers, random_boxes
from rl_vlm.tiny.cached import cached_model
from rl_vlm.tiny.family import Resolution
from rl_vlm.tiny.warm_up import warm_up

RESOLUTION = Resolution(side=32, tokens_per_side=1)
"""An image is a single token."""


@cached_model(scenes)
def starting_model(directory: Path, seed: int) -> None:
    """Write a model that answers `{"bbox_2d": [x1, y1, x2, y2]}` with random numbers."""
    from rl_vlm.tiny.build import build_tiny
    from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS

    questions = [QUESTION.format(f"{colour} {shape}") for colour in COLOURS for shape in SHAPES]
    build_tiny(
        "qwen3_vl", directory, corpus=(*DEFAULT_CORPUS, *questions), whole_tokens=BOX_TOKENS, initializer_range=0.1,
        resolution=RESOLUTION, seed=seed,
    )  # fmt: skip
    order_numbers(directory, seed)
    data = DataConfig(dataset_name="examples.grounding.scenes:train_rows", max_pixels=RESOLUTION.side**2)
    warm_up(directory, data, random_boxes(SIDES, seed), num_steps=80, num_images=32, learning_rate=2e-3)
