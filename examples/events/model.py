"""Qwen3-VLs of 0.6 million parameters that watch clips and answer at random.

`configs/blinks.yaml` and `configs/order.yaml` name the two models. A short supervised warm-up on random answers teaches
their form.
"""

from __future__ import annotations

from pathlib import Path

from examples.events import clips
from examples.events.clips import CORNERS, COUNTS, FPS, HOW_OFTEN, WHERE_FIRST
from examples.motion import model as motion
from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.cached import cached_model


@cached_model(clips, motion)
def counting_model(directory: Path, seed: int) -> None:
    """Write a model that answers `<answer>count</answer>` with a random count."""
    motion.write_model(directory, seed, HOW_OFTEN, COUNTS, rows("blinks_to_train"))


@cached_model(clips, motion)
def ordering_model(directory: Path, seed: int) -> None:
    """Write a model that answers `<answer>corner</answer>` with a random corner."""
    motion.write_model(directory, seed, WHERE_FIRST, CORNERS, rows("order_to_train"))


def rows(name: str) -> DataConfig:
    """Return the data of a function of `clips`."""
    return DataConfig(dataset_name=f"{clips.__name__}:{name}", fps=FPS)
