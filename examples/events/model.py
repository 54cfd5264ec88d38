"""Qwen3-VLs of 0.6 million parameters that watch clips and answer at random.

`configs/blinks.yaml` and `configs/order.yaml` name the two models. A short supervised warm-up on random answers teaches
their form.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from examples.events import clips
from examples.events.clips import CORNERS, COUNTS, FPS, HOW_OFTEN, SIDE, WHERE_FIRST
from examples.motion.model import MEAN, SPREAD
from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.cached import cached_model
from rl_vlm.tiny.family import Resolution
from rl_vlm.tiny.warm_up import random_answers, warm_up


@cached_model(clips)
def counting_model(directory: Path, seed: int) -> None:
    """Write a model that answers `<answer>count</answer>` with a random count."""
    build(directory, seed, HOW_OFTEN, COUNTS, "blinks_to_train")


@cached_model(clips)
def ordering_model(directory: Path, seed: int) -> None:
    """Write a model that answers `<answer>corner</answer>` with a random corner."""
    build(directory, seed, WHERE_FIRST, CORNERS, "order_to_train")


def build(directory: Path, seed: int, question: str, answers: Iterable[str], rows: str) -> None:
    """Write a model that sees two frames as one token, and gives one of the answers at random."""
    from rl_vlm.tiny.build import build_tiny
    from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS

    build_tiny(
        "qwen3_vl", directory, corpus=(*DEFAULT_CORPUS, question), whole_tokens=("<answer>", "</answer>", *answers),
        initializer_range=0.1, resolution=Resolution(SIDE, tokens_per_side=1), pixels=(MEAN, SPREAD), seed=seed,
    )  # fmt: skip
    data = DataConfig(dataset_name=f"{clips.__name__}:{rows}", fps=FPS)
    warm_up(directory, data, random_answers([f"<answer>{each}</answer>" for each in answers], seed))
