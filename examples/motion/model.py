"""A Qwen3-VL of 0.6 million parameters that watches clips and answers at random.

`configs/motion.yaml` names `starting_model`. A short supervised warm-up on random answers teaches it their form.
"""

from __future__ import annotations

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
    from rl_vlm.tiny.build import build_tiny
    from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS

    build_tiny(
        "qwen3_vl", directory, corpus=(*DEFAULT_CORPUS, QUESTION), whole_tokens=("<answer>", "</answer>", *WAYS),
        initializer_range=0.1, resolution=Resolution(SIDE, tokens_per_side=1), pixels=(MEAN, SPREAD), seed=seed,
    )  # fmt: skip
    data = DataConfig(dataset_name=f"{clips.__name__}:train_rows", fps=FPS)
    warm_up(directory, data, random_answers([f"<answer>{way}</answer>" for way in WAYS], seed))
