"""Difficulty filtering: the dataset of prompts whose success rate lies in a range, to train on.

A completion succeeds where a reward function scores it 1 or more, as in pass@k. A prompt's success rate is the share
of its scored completions that do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL.Image import Image

from rl_vlm.data import Rows
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.files import written_whole
from rl_vlm.images import png_bytes
from rl_vlm.reward import RewardSuite
from rl_vlm.sources import IMAGE_COLUMNS


@dataclass(frozen=True)
class KeptRange:
    """Success rates of one reward function that are kept, both bounds included."""

    low: float
    high: float
    function: str


def kept_range(low: float, high: float, name: str | None, rewards: RewardSuite, num_generations: int) -> KeptRange:
    """The range for function `name`, or for the one with the largest weight.

    Raises ConfigError if no function has that name, if several have the largest weight, or if no prompt can lie in it.
    """
    largest = [
        known for known, weight in zip(rewards.names, rewards.weights, strict=True) if weight == max(rewards.weights)
    ]
    if name is not None and name not in rewards.names:
        raise ConfigError(f"--keep-by {name}: no reward function has that name; there are {', '.join(rewards.names)}")
    if name is None and len(largest) > 1:
        raise ConfigError(
            f"--keep: the reward functions {', '.join(largest)} have the same weight; name the one that decides what "
            "counts as a success with --keep-by"
        )
    if not any(low <= count / num_generations <= high for count in range(num_generations + 1)):
        rates = ", ".join(str(Fraction(count, num_generations)) for count in range(num_generations + 1))
        raise ConfigError(
            f"--keep {low:g}..{high:g}: with rollout.num_generations_eval {num_generations} a success rate is one of "
            f"{rates}; sample more completions per prompt"
        )
    return KeptRange(low, high, name or largest[0])


def success_rates(completions: Sequence[Mapping[str, Any]], function: str) -> dict[int, float]:
    """Success rate by row of the data, for rows with a scored completion."""
    successes: dict[int, list[bool]] = {}
    for completion in completions:
        if completion[function] is not None:
            successes.setdefault(completion["row"], []).append(completion[function] >= 1)
    return {row: sum(found) / len(found) for row, found in successes.items()}


def write_kept(path: Path, rows: Rows, completions: Sequence[Mapping[str, Any]], kept: KeptRange) -> int:
    """Write the rows of the data that are kept, with their success rate, and return their number.

    All columns are as they were, and images are embedded. Without such a row there is no file. Raises DataError if the
    rows have no common types.
    """
    import datasets
    import pyarrow

    path.unlink(missing_ok=True)
    rates = {row: r for row, r in success_rates(completions, kept.function).items() if kept.low <= r <= kept.high}
    if not rates:
        return 0
    given = [rows.source[row] | {"success_rate": rates[row]} for row in sorted(rates)]
    columns = {name: [row.get(name) for row in given] for name in dict.fromkeys(name for row in given for name in row)}
    for name in columns.keys() & set(IMAGE_COLUMNS):
        columns[name] = [embedded(value, rows.image_folder) for value in columns[name]]
    try:
        dataset = datasets.Dataset.from_dict(columns)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{rows.name}: its rows cannot be written to {path}: {error}") from error
    for name in columns.keys() & set(IMAGE_COLUMNS):
        holds_lists = isinstance(dataset.features[name], datasets.List)
        dataset = dataset.cast_column(name, datasets.List(datasets.Image()) if holds_lists else datasets.Image())
    with written_whole(path) as unfinished:
        dataset.to_parquet(str(unfinished))
    return len(given)


def embedded(value: Any, folder: Path) -> Any:
    """An image, a list of them, or None, with encoded bytes in place of paths and pixels."""
    if isinstance(value, list):
        return [encoded(image, folder) for image in value]
    return None if value is None else encoded(value, folder)


def encoded(value: Any, folder: Path) -> dict[str, bytes | None]:
    """An image as `datasets` stores it: the bytes of its file, or of a PNG of its pixels."""
    if isinstance(value, dict):
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if isinstance(value, Image):
        value = png_bytes(value)
    return {"bytes": value if isinstance(value, bytes) else (folder / value).read_bytes(), "path": None}
