"""A Qwen3-VL of 0.6 million parameters that watches clips and answers with a random interval.

`configs/intervals.yaml` names `starting_model`. A short supervised warm-up on random answers teaches it their form.
"""

from __future__ import annotations

from pathlib import Path

from examples.intervals import clips
from examples.intervals.clips import FPS, LENGTH, QUESTION, SECONDS
from examples.motion.clips import GREY, SIDE
from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.cached import cached_model
from rl_vlm.tiny.family import Resolution
from rl_vlm.tiny.warm_up import random_answers, warm_up

INTERVALS = [f"{start} to {start + LENGTH}" for start in range(SECONDS - LENGTH + 1)]


@cached_model(clips)
def starting_model(directory: Path, seed: int) -> None:
    """Write a model that sees a second as one token, and answers `<answer>start to end</answer>` at random.

    An interval is one token, so that the model cannot choose an end for all starts.
    """
    from rl_vlm.tiny.build import build_tiny
    from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS

    build_tiny(
        "qwen3_vl", directory, corpus=(*DEFAULT_CORPUS, QUESTION),
        whole_tokens=("<answer>", "</answer>", *INTERVALS),
        initializer_range=0.1, resolution=Resolution(SIDE, tokens_per_side=1), pixels=(GREY / 255, 0.1), seed=seed,
    )  # fmt: skip
    data = DataConfig(dataset_name=f"{clips.__name__}:train_rows", fps=FPS)
    warm_up(directory, data, random_answers([f"<answer>{each}</answer>" for each in INTERVALS], seed))
