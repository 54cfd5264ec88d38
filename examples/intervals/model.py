"""A Qwen3-VL of 0.6 million parameters that watches clips and answers with a random interval.

`configs/intervals.yaml` names `starting_model`. A short supervised warm-up on random answers teaches it their form.
"""

from __future__ import annotations

from pathlib import Path

from examples.intervals import clips
from examples.intervals.clips import FPS, LENGTH, QUESTION, SECONDS
from examples.motion import model as motion
from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.cached import cached_model

INTERVALS = [f"{start} to {start + LENGTH}" for start in range(SECONDS - LENGTH + 1)]


@cached_model(clips, motion)
def starting_model(directory: Path, seed: int) -> None:
    """Write a model that sees a second as one token, and answers `<answer>start to end</answer>` at random.

    An interval is one token, so that the model cannot choose an end for all starts.
    """
    data = DataConfig(dataset_name=f"{clips.__name__}:train_rows", fps=FPS)
    motion.write_model(directory, seed, QUESTION, INTERVALS, data)
