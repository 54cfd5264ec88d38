"""Changes of scores on the same held-out rows, from one model to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.evaluation.figures import bootstrap_interval
from rl_vlm.log.changes import Change
from rl_vlm.log.completions import function_columns
from rl_vlm.log.metrics import is_number

Pairs = tuple[Sequence[float], Sequence[float]]


def paired_changes(before: Path, after: Path) -> list[Change]:
    """Return the change of each score between the completions files of two evaluations, paired by row.

    Raises the errors of `paired_values`.
    """
    return [paired_change(name, *pairs) for name, pairs in paired_values(before, after).items()]


def paired_change(name: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """Return the change of held-out values that are paired, with the bootstrap interval of its mean over pairs."""
    low, high = bootstrap_interval([new - old for old, new in zip(before, after, strict=True)])
    return Change(name, float(np.mean(before)), float(np.mean(after)), low, high, len(before), "held-out")


def paired_values(before: Path, after: Path) -> dict[str, Pairs]:
    """Return the values of each row that two evaluations scored: the reward, and the scores of several functions.

    `before` and `after` are their completions files. Raises an error of pyarrow or of the file system if one is missing
    or damaged.
    """
    from pyarrow.parquet import ParquetFile

    files = [ParquetFile(path) for path in (before, after)]
    functions = function_columns(files[-1].schema_arrow.names)
    names = ["reward", *(functions if len(functions) > 1 else [])]
    rows_before, rows_after = (file.read(columns=["sample_id", *names]).to_pylist() for file in files)
    pairs = {name: shared(mean_values(rows_before, name), mean_values(rows_after, name)) for name in names}
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
