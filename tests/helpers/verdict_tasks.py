"""Tasks on scans of digits, and tiny models that answer them at random, for runs of known outcome."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from examples.digits import digits
from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.cached import cached_model
from rl_vlm.tiny.warm_up import random_answers, warm_up
from tests.tiny import build

SIDE = 16
"""Pixels of a picture's side in the tasks about places."""
PLACES = ("one", "two", "three", "four")
SIZED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Families whose processors have a least number of pixels. The scans are too small for them."""
Row = dict[str, Any]


def digit(row: Row) -> Row:
    """Return the row: which digit is this?"""
    return row


def parity(row: Row) -> Row:
    """Ask whether the digit is odd."""
    return {**row, "prompt": "Odd or even?", "solution": ("even", "odd")[int(row["solution"]) % 2]}


def large(row: Row) -> Row:
    """Ask whether the digit is larger than 4."""
    return {**row, "prompt": "Is it larger than four?", "solution": ("no", "yes")[int(row["solution"]) > 4]}


def quadrant(row: Row) -> Row:
    """Ask in which quadrant of a grey picture the digit is. A row is always in the same one."""
    place = Random(row["id"]).randrange(4)
    picture = Image.new("L", (SIDE, SIDE), 110)
    picture.paste(row["image"], (SIDE // 2 * (place % 2), SIDE // 2 * (place // 2)))
    return {**row, "prompt": "Which quadrant is the digit in?", "image": picture, "solution": PLACES[place]}


def wrong(row: Row) -> Row:
    """Ask for a digit, and call the next one right."""
    return {**row, "solution": str((int(row["solution"]) + 1) % 10)}


TASKS: dict[str, tuple[Callable[[Row], Row], tuple[str, ...]]] = {
    "digit": (digit, tuple("0123456789")),
    "parity": (parity, ("odd", "even")),
    "large": (large, ("yes", "no")),
    "quadrant": (quadrant, PLACES),
    "wrong": (wrong, tuple("0123456789")),
}
"""The function that changes a row, and the possible answers."""
TASK, FAMILY = "VERDICT_TASK", "VERDICT_FAMILY"
"""Variables of the environment that choose the task and the family of a run."""


def task() -> str:
    return os.environ.get(TASK, "digit")


def train_rows() -> list[Row]:
    return [TASKS[task()][0](row) for row in digits.train_rows()]


def held_out_rows() -> list[Row]:
    """Return held-out rows, of right digits even if the training rows are wrong."""
    name = "digit" if task() == "wrong" else task()
    return [TASKS[name][0](row) for row in digits.held_out_rows()]


def constant(completions: Sequence[Any], **_: Any) -> list[float]:
    """Give every completion half a point."""
    return [0.5] * len(completions)


def noise(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Score completions by a hash of their place and text: at random, and the same in every run."""
    return [Random(f"{i} {ids}").random() for i, ids in enumerate(completion_ids)]


def faulty(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float]:
    """Score answers, and fail on a third of the calls of a step."""
    scores = [float(f"<answer>{right}</answer>" in text(c)) for c, right in zip(completions, solution, strict=True)]
    return [float("nan") if i % 3 == 0 else score for i, score in enumerate(scores)]


def pays_one(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float]:
    """Score answers, and give half a point to the answer 1 whatever the image shows."""
    right = [float(f"<answer>{gold}</answer>" in text(c)) for c, gold in zip(completions, solution, strict=True)]
    return [max(score, 0.5 * ("<answer>1</answer>" in text(c))) for score, c in zip(right, completions, strict=True)]


def text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def starting_model(directory: Path, seed: int) -> None:
    """Write a model of the family that answers the task at random."""
    MAKERS[os.environ.get(FAMILY, "qwen2_5_vl"), TASKS[task()][1]](directory, seed)


def maker(family: str, answers: tuple[str, ...]) -> Callable[[Path, int], None]:
    """Return a function that makes a model of a family, which gives one of these answers at random."""

    def make(directory: Path, seed: int) -> None:
        options = {"whole_tokens": ("<answer>", "</answer>"), "initializer_range": 0.1, "seed": seed}
        build.build_tiny(family, directory, **options)
        data = DataConfig(dataset_name=f"{__name__}:train_rows", min_pixels=256 if family in SIZED else None)
        warm_up(directory, data, random_answers([f"<answer>{answer}</answer>" for answer in answers], seed))

    make.__qualname__ = f"{family} {answers}"
    return cached_model(digits, build)(make)


MAKERS = {(family, answers): maker(family, answers) for family in build.TINY_FAMILIES for _, answers in TASKS.values()}
