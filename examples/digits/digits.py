"""Handwritten digits: scikit-learn's 1,797 real scans of 8 x 8 pixels, and a model that cannot read them yet.

`configs/digits.yaml` names these functions. A short supervised warm-up on random labels teaches the starting model the
answer format, so that its accuracy is at chance level and all further skill comes from the rewards.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.cached import cached_model
from rl_vlm.tiny.warm_up import random_answers, warm_up

QUESTION = "Which digit is this?"
ANSWERS = [f"<answer>{digit}</answer>" for digit in range(10)]


@cache
def _scans() -> list[dict[str, Any]]:
    """Return all scans as dataset rows, each with a unique id."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return [
        {
            "id": f"digit-{i:04d}",
            "prompt": QUESTION,
            "image": Image.fromarray((scan * (255 / 16)).astype("uint8")),
            "solution": str(label),
        }
        for i, (scan, label) in enumerate(zip(digits.images, digits.target, strict=True))
    ]


def _split() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the rows into three quarters to train on and a stratified quarter held out, the same in every run."""
    from sklearn.model_selection import train_test_split

    labels = [row["solution"] for row in _scans()]
    parts: Any = train_test_split(_scans(), test_size=0.25, stratify=labels, random_state=0)
    return parts[0], parts[1]


def train_rows() -> list[dict[str, Any]]:
    """Return the rows to train on."""
    return _split()[0]


def held_out_rows() -> list[dict[str, Any]]:
    """Return the rows that are never trained on."""
    return _split()[1]


@cached_model()
def starting_model(directory: Path, seed: int) -> None:
    """Write a Qwen2.5-VL of half a million parameters that answers `<answer>d</answer>` with a random digit."""
    from rl_vlm.tiny.build import build_tiny

    build_tiny("qwen2_5_vl", directory, whole_tokens=("<answer>", "</answer>"), initializer_range=0.1, seed=seed)
    teach_format(directory, seed)


def teach_format(directory: Path, seed: int) -> None:
    """Train on images with random labels, and overwrite the checkpoint's weights."""
    data = DataConfig(dataset_name=f"{__name__}:train_rows", min_pixels=256)
    warm_up(directory, data, random_answers(ANSWERS, seed))
