"""A Qwen3-VL of 0.6 million parameters that watches clips and answers at random.

`configs/motion.yaml` names `starting_model`. A short supervised warm-up on random answers teaches it their form.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from examples.motion import clips
from examples.motion.clips import FPS, GREY, QUESTION, SIDE, WAYS
from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.cached import cached_model
from rl_vlm.tiny.family import Resolution
from rl_vlm.tiny.warm_up import random_answers, warm_up

MEAN, SPREAD = GREY / 255, 0.1
"""Brightness that the processor subtracts and divides by. They are those of these frames, so that a digit shows."""


@cached_model(clips)
def starting_model(directory: Path, seed: int) -> None:
    """Write a model that sees two frames as one token, and answers `<answer>way</answer>` with a random way."""
    write_model(directory, seed, QUESTION, WAYS, DataConfig(dataset_name=f"{clips.__name__}:train_rows", fps=FPS))


def write_model(directory: Path, seed: int, question: str, answers: Iterable[str], data: DataConfig) -> None:
    """Write a model that sees two frames as one token, and gives one of the answers at random. Each is one token.

    `data` has the rows of the warm-up.
    """
    from rl_vlm.tiny.build import build_tiny
    from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS

    build_tiny(
        "qwen3_vl", directory, corpus=(*DEFAULT_CORPUS, question), whole_tokens=("<answer>", "</answer>", *answers),
        initializer_range=0.1, resolution=Resolution(SIDE, tokens_per_side=1), pixels=(MEAN, SPREAD), seed=seed,
    )  # fmt: skip
    warm_up(directory, data, random_answers([f"<answer>{each}</answer>" for each in answers], seed))
