"""Difficulty filtering: writes a training dataset of the prompts with a success rate in a range.

A completion succeeds if a reward function scores it `solved_from` or more, as in pass@k. A prompt's success rate is the
share of its scored completions that succeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_vlm.data.images import encoded_image
from rl_vlm.data.samples import Rows
from rl_vlm.data.tables import IMAGE_COLUMNS, VIDEO_COLUMNS
from rl_vlm.data.video.values import absolute_video
from rl_vlm.errors import DataError
from rl_vlm.evaluation.options import SuccessRange
from rl_vlm.log.files import atomic_write


def success_rates(
    completions: Sequence[Mapping[str, Any]], function: str, solved_from: float = 1.0
) -> dict[int, float]:
    """Compute the success rate of each data row with a scored completion."""
    successes: dict[int, list[bool]] = {}
    for completion in completions:
        if completion[function] is not None:
            successes.setdefault(completion["row"], []).append(completion[function] >= solved_from)
    return {row: sum(found) / len(found) for row, found in successes.items()}


def write_selected_rows(path: Path, rows: Rows, completions: Sequence[Mapping[str, Any]], kept: SuccessRange) -> int:
    """Write the data rows in the range, with their success rates, and return their number.

    Columns keep the data's names, so that the same settings can read the file. Images are embedded, and videos keep
    their files. If no row is in the range, no file is written. Raises DataError if the types of the rows differ.
    """
    import datasets
    import pyarrow

    path.unlink(missing_ok=True)
    rates = success_rates(completions, kept.function, kept.solved_from)
    rates = {row: rate for row, rate in rates.items() if kept.low <= rate <= kept.high}
    if not rates:
        return 0
    chosen = sorted(rates)
    given = [rows.source[row] | {"success_rate": rates[row]} for row in chosen]
    columns = {name: [row.get(name) for row in given] for name in dict.fromkeys(name for row in given for name in row)}
    for name in columns.keys() & set(VIDEO_COLUMNS):
        folders = [rows.part(row).video_folder for row in chosen]
        columns[name] = [absolute_video(value, folder) for value, folder in zip(columns[name], folders, strict=True)]
    folders = [rows.part(row).image_folder for row in chosen]
    for name in columns.keys() & set(IMAGE_COLUMNS):
        columns[name] = [embedded(value, folder) for value, folder in zip(columns[name], folders, strict=True)]
    try:
        dataset = datasets.Dataset.from_dict(columns)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{rows.name}: its rows cannot be written to {path}: {error}") from error
    for name in columns.keys() & set(IMAGE_COLUMNS):
        holds_lists = isinstance(dataset.features[name], datasets.List)
        dataset = dataset.cast_column(name, datasets.List(datasets.Image()) if holds_lists else datasets.Image())
    own_names = {role: column for role, column in rows.config.columns.items() if role in columns}
    dataset = dataset.rename_columns(own_names)
    with atomic_write(path) as unfinished:
        dataset.to_parquet(str(unfinished))
    return len(given)


def embedded(value: Any, folder: Path) -> Any:
    """Replace paths and pixels by encoded bytes. `value` is an image, a list of images, or None."""
    if isinstance(value, list):
        return [embedded(image, folder) for image in value]
    return None if value is None else {"bytes": encoded_image(value, folder), "path": None}
