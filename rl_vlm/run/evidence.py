"""Read the evidence for a verdict from the directory of a run, complete or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.log.completions import answer, function_columns, held_out_path, window_paths, windows_of
from rl_vlm.log.files import METRICS
from rl_vlm.log.metrics import BEST_OF_GROUP, DISTINCT_ANSWERS, MetricsLog
from rl_vlm.run.verdict import Evidence, Line, Pairs, is_number

MOST_WINDOWS = 500
"""Largest number of windows to read if metrics lack the figures of groups. Of more, read those at even distances."""


def read_evidence(folder: Path, result_step: int | None = None, decisive: str | None = None) -> Evidence:
    """Read the evidence of a run.

    `result_step` is the step of the model that the run ends with, by default the step of the last evaluation. If the
    metrics lack the figures of groups, as in old runs, the answers to the function `decisive` are counted.
    """
    lacks: list[str] = []
    lines = MetricsLog(folder / METRICS).read()
    if not any(BEST_OF_GROUP in line for line in lines):
        lines = with_groups(folder, lines, decisive, lacks)
    evaluated: list[int] = [line["step"] for line in lines if "eval_num_samples" in line]
    held_out: dict[str, Pairs] = {}
    if len(evaluated) > 1:
        last = result_step if result_step is not None and result_step in evaluated else evaluated[-1]
        held_out = paired_values(folder, evaluated[0], last)
        if not held_out:
            lacks.append(
                "The completions of both evaluations are not logged (log.log_completions), so the change of the "
                "held-out reward has no interval. Training data are judged."
            )
    elif evaluated:
        lacks.append(f"There is one evaluation, after step {evaluated[0]:,}. Training data are judged.")
    else:
        lacks.append("There are no held-out data. Training data are judged.")
    return Evidence(lines, held_out, len(evaluated), lacks)


def paired_values(folder: Path, first: int, last: int) -> dict[str, Pairs]:
    """Return the values of each row that two evaluations scored: the reward, and the scores of several functions.

    Empty if a file is missing or damaged.
    """
    from pyarrow.parquet import ParquetFile

    try:
        files = [ParquetFile(held_out_path(folder, step)) for step in (first, last)]
        functions = function_columns(files[-1].schema_arrow.names)
        names = ["reward", *(functions if len(functions) > 1 else [])]
        before, after = (file.read(columns=["sample_id", *names]).to_pylist() for file in files)
    except (OSError, ValueError):  # pyarrow's errors are ValueErrors
        return {}
    pairs = {name: shared(mean_values(before, name), mean_values(after, name)) for name in names}
    return {name: both for name, both in pairs.items() if both[0]}


def mean_values(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Return the mean of a column for each sample, without completions that have no value."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if is_number(row.get(name)):
            values.setdefault(row["sample_id"], []).append(row[name])
    return {sample: float(np.mean(found)) for sample, found in values.items()}


def shared(before: Mapping[str, float], after: Mapping[str, float]) -> Pairs:
    """Return the values of the samples that both have."""
    both = [sample for sample in before if sample in after]
    return [before[sample] for sample in both], [after[sample] for sample in both]


def with_groups(folder: Path, lines: Sequence[Line], decisive: str | None, lacks: list[str]) -> list[dict[str, Any]]:
    """Add the figures of groups to lines that were written before they were metrics, from the completions."""
    paths = window_paths(folder)
    every = max(1, -(-len(paths) // MOST_WINDOWS))
    found: dict[int, dict[str, float]] = {}
    for path in paths[::every]:
        found |= group_figures(path, decisive)
    if not found:
        lacks.append("The completions are not logged (log.log_completions), so a collapse cannot be seen.")
    figures: Mapping[str, float] = {}
    lines_with = []
    for line in lines:
        figures = found.get(line["step"], figures)
        lines_with.append({**line, **figures} if line["step"] > 0 else dict(line))
    return lines_with


def group_figures(path: Path, decisive: str | None) -> dict[int, dict[str, float]]:
    """Return the figures of the groups in a completions file, by the first optimizer step that trains on them.

    A file that cannot be read has none.
    """
    from pyarrow.parquet import ParquetFile

    wanted = ["step", "group_id", "completion", "reward", "answer", f"{decisive}/answer"]
    try:
        file = ParquetFile(path)
        rows = file.read(columns=[name for name in wanted if name in file.schema_arrow.names]).to_pylist()
    except (OSError, ValueError):
        return {}
    return {
        step + 1: {
            BEST_OF_GROUP: float(np.mean([max(rewards) for group in groups if (rewards := rewards_of(group))])),
            DISTINCT_ANSWERS: float(np.mean([len({answer(row, decisive or "") for row in group}) for group in groups])),
        }
        for step, groups in windows_of(rows).items()
        if any(map(rewards_of, groups))
    }


def rewards_of(group: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the rewards of the completions that have one."""
    return [row["reward"] for row in group if is_number(row.get("reward"))]
