"""Read the evidence for a verdict from the directory of a run, complete or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.errors import text_of
from rl_vlm.evaluation.paired import Pairs, paired_values
from rl_vlm.log.completions import distinct_answers, held_out_path, step_of, values_of, window_paths, windows_of
from rl_vlm.log.metrics import BEST_OF_GROUP, DISTINCT_ANSWERS, FAULTED, ITERATION, NUM_GROUPS
from rl_vlm.run.verdict import Evidence, Line

MOST_WINDOWS = 500
"""Maximum number of windows to read if metrics lack the figures of groups. If there are more, read windows at even
distances."""
NOT_SEEN = "so a collapse cannot be seen"


def read_evidence(
    folder: Path,
    lines: Sequence[Line],
    result_step: int | None = None,
    decisive: str | None = None,
    num_generations: int | None = None,
) -> Evidence:
    """Read the evidence for the steps that `lines` of the metrics have, of groups of `num_generations` completions.

    `result_step` is the step of the model that the run ends with, by default the step of the last evaluation. If the
    metrics lack the figures of groups, as in old runs, the answers to the function `decisive` are counted.
    """
    lines = with_groups(folder, lines, decisive)
    evaluated: list[int] = [line["step"] for line in lines if "eval_num_samples" in line]
    held_out: Mapping[str, Pairs] = {}
    lacks = lacks_of(lines)
    if len(evaluated) > 1:
        last = result_step if result_step is not None and result_step in evaluated else evaluated[-1]
        try:
            held_out = paired_values(held_out_path(folder, evaluated[0]), held_out_path(folder, last))
        except Exception as error:  # a verdict is needed most for runs that went wrong
            lacks.append(
                f"The completions of two evaluations cannot be read ({text_of(error)}): training data are judged."
            )
    elif evaluated:
        lacks.append(f"There is one evaluation, after step {evaluated[0]:,}. Training data are judged.")
    else:
        lacks.append("There are no held-out data. Training data are judged.")
    return Evidence(lines, held_out, len(evaluated), num_generations, lacks)


def lacks_of(lines: Sequence[Line]) -> list[str]:
    """Return sentences on missing figures of groups."""
    steps = [line for line in lines if line["step"] > 0]
    if not steps:
        return []
    lacks = []
    if steps[0]["step"] > 1:
        lacks.append(f"Steps before {steps[0]['step']:,} are in another directory, {NOT_SEEN}.")
    elif BEST_OF_GROUP not in steps[0]:
        lacks.append(f"The completions of the first step are not logged (log.log_completions), {NOT_SEEN}.")
    if any(line.get("resampling/rounds") for line in steps):
        lacks.append(
            "Groups without variance were replaced (rollout.max_resampling_rounds). Training figures are of the groups "
            "that were kept, and hide a loss of spread."
        )
    return lacks


def with_groups(folder: Path, lines: Sequence[Line], decisive: str | None) -> list[dict[str, Any]]:
    """Add the figures of groups to lines without them, as of older versions, from the completions.

    A window's first step has new groups. Whether its later steps do is not known, so they count as repeated.
    """
    lacking = [line for line in lines if line["step"] > 0 and BEST_OF_GROUP not in line]
    if not lacking:
        return [dict(line) for line in lines]
    last = lacking[-1]["step"]
    paths = [path for path in window_paths(folder) if step_of(path) < last]
    every = max(1, -(-len(paths) // MOST_WINDOWS))
    found: dict[int, dict[str, float]] = {}
    for path in paths[::every]:
        found |= group_figures(path, decisive)
    first_steps = {step_of(path) + 1 for path in paths}
    repeated = {ITERATION: 1} if first_steps else {}
    return [
        dict(line) if BEST_OF_GROUP in line or line["step"] == 0
        else {**line, **found.get(line["step"], {})} if line["step"] in first_steps
        else {**line, **repeated}
        for line in lines
    ]  # fmt: skip


def group_figures(path: Path, decisive: str | None) -> dict[int, dict[str, float]]:
    """Return the figures of the groups in a completions file, by the first optimizer step that trains on them.

    A file that cannot be read has none.
    """
    from pyarrow.parquet import ParquetFile

    wanted = ["step", "group_id", "completion", "reward", "fault", "answer", f"{decisive}/answer"]
    try:
        file = ParquetFile(path)
        rows = file.read(columns=[name for name in wanted if name in file.schema_arrow.names]).to_pylist()
    except Exception:  # the report names damaged files
        return {}
    figures = {}
    for step, groups in windows_of(rows).items():
        if rewards := [found for group in groups if (found := values_of(group, "reward"))]:
            figures[step + 1] = {
                BEST_OF_GROUP: float(np.mean([*map(max, rewards)])),
                DISTINCT_ANSWERS: float(np.mean([distinct_answers(group, decisive or "") for group in groups])),
                FAULTED: float(np.mean([row.get("fault") is not None for group in groups for row in group])),
                NUM_GROUPS: len(groups),
            }
    return figures
