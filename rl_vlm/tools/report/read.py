"""Read the files of a run or an evaluation for a report, as plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from rl_vlm.config import yaml_text
from rl_vlm.errors import ConfigError, text_of
from rl_vlm.log.completions import function_columns, held_out_paths, window_paths, windows_of
from rl_vlm.log.directory import COMPARISON, CONFIG, DROPPED, EVALUATED, SUMMARY
from rl_vlm.log.files import METRICS
from rl_vlm.log.metrics import MetricsLog, function_name, is_score
from rl_vlm.log.starts import STARTS, read_starts

LoggedRow = dict[str, Any]
T = TypeVar("T")

MOST_ROWS = 50_000
"""Largest number of completions to read from a run. If there are more, every n-th window is read."""
MOST_HELD_OUT_ROWS = 20_000
"""The same for held-out completions."""
MOST_BYTES = 200_000_000
"""The same in bytes of the columns, since completions can be long."""


@dataclass(frozen=True)
class RunResults:
    """One run, or the evaluation of one model."""

    name: str
    path: Path
    kind: Literal["training", "evaluation"]
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Lines of `metrics.jsonl`. An evaluation has none."""
    rows: list[LoggedRow] = field(default_factory=list)
    """A dict per completion that was read, in order of the steps."""
    num_rows: int = 0
    """Completions in all of their files."""
    held_out: list[LoggedRow] = field(default_factory=list)
    """A dict per completion that was read from the evaluations within a training run, in order of the steps."""
    num_held_out: int = 0
    names: list[str] = field(default_factory=list)
    """Reward functions."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Empty while the run is not complete."""
    settings: dict[str, Any] = field(default_factory=dict)
    """By section."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the data that were left out."""
    notes: list[str] = field(default_factory=list)
    """Files that could not be read."""

    @property
    def windows(self) -> dict[int, list[list[LoggedRow]]]:
        """Return the groups of a training run by step; an evaluation has none."""
        return windows_of(self.rows) if self.kind == "training" else {}

    @property
    def image_folder(self) -> Path:
        """Return the folder that relative paths of images start from."""
        return self.path / "completions" if self.kind == "training" else self.path

    @property
    def root(self) -> Path:
        """Return the directory that holds its images. The evaluations of a comparison share one."""
        return self.path if self.kind == "training" else started_in(self.path)

    @property
    def reward_funcs(self) -> list[Any]:
        return self.settings.get("rewards", {}).get("reward_funcs", [])

    @property
    def decisive(self) -> list[str]:
        """Return the functions with the largest weight. Their scores say whether a completion solves its prompt."""
        return [name for name in self.names if self.weights[name] == max(self.weights.values())]

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights of the functions, 1 if they are not known."""
        return self.by_name(self.settings.get("rewards", {}).get("reward_weights") or self.of_functions("weight"))

    @property
    def solved_from(self) -> dict[str, float]:
        """Return the least score of each function that solves a prompt, 1 if it is not known."""
        return self.by_name(self.of_functions("solved_from"))

    def of_functions(self, key: str) -> list[float]:
        """Return a number from each entry of `reward_funcs`, 1 by default."""
        return [spec.get(key, 1.0) if isinstance(spec, dict) else 1.0 for spec in self.reward_funcs]

    def by_name(self, values: Sequence[float]) -> dict[str, float]:
        """Return the numbers of functions by name. Rewards of environments follow the functions, and have 1."""
        if self.settings.get("rollout", {}).get("environment") is not None:
            values = [*values, *[1.0] * (len(self.names) - len(values))]
        return dict(zip(self.names, values if len(values) == len(self.names) else [1.0] * len(self.names), strict=True))


def read_runs(folders: Sequence[Path]) -> list[RunResults]:
    """Read runs and evaluations, and make their names unique. Raises ConfigError if a folder holds neither."""
    runs = [run for folder in folders for run in read_folder(folder)]
    names = own_names([run.name for run in runs], [run.path.absolute() for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def own_names(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Make names unique. Equal names are replaced by the last parts of their paths, as many as needed."""
    names = list(names)
    for depth in range(2, max(len(path.parts) for path in paths) + 1):
        names = [
            "/".join(path.parts[-depth:]) if names.count(name) > 1 else name
            for name, path in zip(names, paths, strict=True)
        ]
    return names


def holds_results(folder: Path) -> bool:
    """Return whether a folder holds an evaluation, or a comparison of several."""
    return (folder / EVALUATED).is_file() or (folder / COMPARISON).is_file()


def place_of(folder: Path) -> Path:
    """Return the folder that holds a run or an evaluation: `folder`, or `evaluation` in it.

    Raises ConfigError if there is neither.
    """
    if (folder / METRICS).is_file():
        return folder
    for place in (folder, folder / "evaluation"):
        if holds_results(place):
            return place
    raise ConfigError(
        f"{folder} holds neither a run ({METRICS}) nor an evaluation (evaluation/{EVALUATED}): name the "
        "train.output_dir of a run, or the folder of an evaluation"
    )


def read_folder(folder: Path, with_rows: bool = True) -> list[RunResults]:
    """Read a run, an evaluation, or the evaluations of several checkpoints. Raises ConfigError like `place_of`.

    `with_rows` reads the completions too.
    """
    place = place_of(folder)
    if (place / METRICS).is_file():
        return [read_run(place, with_rows)]
    if (place / COMPARISON).is_file():
        names = readable(read_json, place / COMPARISON, {}, [])
        found = [read_evaluation(place / name, name, with_rows) for name in names if holds_results(place / name)]
        if not found:
            raise ConfigError(f"{place / COMPARISON} names no evaluation; run `rl-vlm eval` again")
        return found
    parent = place.absolute().parent
    return [read_evaluation(place, parent.name if place.name == "evaluation" else place.name, with_rows)]


def read_run(folder: Path, with_rows: bool = True) -> RunResults:
    """Read the directory of a training run, complete or not."""
    notes: list[str] = []
    lines = MetricsLog(folder / METRICS).read()
    rows, num_rows = read_windows(window_paths(folder) if with_rows else [], MOST_ROWS, notes)
    held_out, num_held_out = read_windows(held_out_paths(folder) if with_rows else [], MOST_HELD_OUT_ROWS, notes)
    return RunResults(
        folder.absolute().name,
        folder,
        "training",
        lines=lines,
        rows=rows,
        num_rows=num_rows,
        held_out=held_out,
        num_held_out=num_held_out,
        names=function_names(rows) or functions_of(lines),
        summary=readable(read_json, folder / SUMMARY, {}, notes),
        settings=readable(read_settings, folder / CONFIG, {}, notes),
        starts=readable(lambda _: read_starts(folder), folder / STARTS, [], notes),
        dropped=readable(read_json_lines, folder / DROPPED, [], notes),
        notes=notes,
    )


def read_evaluation(folder: Path, name: str, with_rows: bool = True) -> RunResults:
    """Read the evaluation of one model."""
    notes: list[str] = []
    rows, num_rows = read_windows([folder / EVALUATED] if with_rows else [], MOST_ROWS, notes)
    summary = readable(read_json, folder / SUMMARY, {}, notes)
    started = started_in(folder)
    return RunResults(
        name,
        folder,
        "evaluation",
        rows=rows,
        num_rows=num_rows,
        names=function_names(rows) or functions_of([summary]),
        summary=summary,
        settings=readable(read_settings, folder / CONFIG, {}, notes),
        starts=readable(lambda _: read_starts(started), started / STARTS, [], notes),
        dropped=readable(read_json_lines, folder / DROPPED, [], notes),
        notes=notes,
    )


def started_in(folder: Path) -> Path:
    """Return the folder with the starts of an evaluation. A comparison has them in the folder above."""
    above = folder.parent
    return above if not (folder / STARTS).is_file() and (above / STARTS).is_file() else folder


def readable(read: Callable[[Path], T], path: Path, instead: T, notes: list[str]) -> T:
    """Read a file with `read`. Return `instead` if it is missing or damaged; a damaged file adds a line to `notes`.

    Reports are needed most for runs that went wrong, so no file may prevent one.
    """
    if not path.is_file():
        return instead
    try:
        return read(path)
    except Exception as error:
        notes.append(f"{path.name}: {text_of(error)}")
        return instead


def read_windows(paths: Sequence[Path], most: int, notes: list[str]) -> tuple[list[LoggedRow], int]:
    """Return the rows of completions files, and the number of rows in all of them.

    If there are more than `most` rows or `MOST_BYTES`, read every n-th file and the last one. If there is a single
    file, read every n-th group of it.
    """
    from pyarrow.parquet import read_metadata

    found = {path: data for path in paths if (data := readable(read_metadata, path, None, notes)) is not None}
    num_rows = sum(data.num_rows for data in found.values())
    size = sum(data.row_group(i).total_byte_size for data in found.values() for i in range(data.num_row_groups))
    every = max(1, -(-num_rows // most), -(-size // MOST_BYTES))
    chosen = [path for i, path in enumerate(found) if i % every == 0 or i == len(found) - 1]
    of_file = every if len(found) == 1 else 1
    rows = [row for path in chosen for row in readable(lambda p: list(read_groups(p, of_file)), path, [], notes)]
    return rows, num_rows


def read_groups(path: Path, every: int) -> Iterator[LoggedRow]:
    """Yield the rows of each `every`-th group of a completions file."""
    from pyarrow.parquet import ParquetFile

    number, last = -1, None
    for batch in ParquetFile(path).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            if row["group_id"] != last:
                number, last = number + 1, row["group_id"]
            if number % every == 0:
                yield row


def function_names(rows: Sequence[LoggedRow]) -> list[str]:
    """Return the reward functions in the first and the last row."""
    return list(dict.fromkeys(name for row in (*rows[:1], *rows[-1:]) for name in function_columns(list(row))))


def functions_of(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the reward functions whose scores the metrics have."""
    return list(dict.fromkeys(function_name(metric) for line in lines for metric in line if is_score(metric)))


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [dict(json.loads(line)) for line in path.read_text().splitlines()]


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings by section, without empty sections."""
    return {section: dict(leaves) for section, leaves in dict(yaml_text.parse(path.read_text())).items() if leaves}
