"""How diverse the completions of a prompt are, and which prompts are never or always solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_vlm.evaluation.figures import pass_at
from rl_vlm.log.completions import distinct_answers, values_of, windows_of
from rl_vlm.tools.report.read import LoggedRow, RunResults

MOST_LISTED = 60
"""Largest number of prompts that are listed by id."""
SHARE = 0.1


@dataclass(frozen=True)
class PassRates:
    """pass@k at one end of a run."""

    label: str
    rates: dict[int, float]


@dataclass(frozen=True)
class Diversity:
    """Diversity of one run, judged by a reward function with the largest weight."""

    name: str
    function: str
    solved_from: float
    num_prompts: int
    distinct: str
    """Distinct answers per group, at the start and at the end."""
    passes: list[PassRates]
    never: list[str]
    """Ids of prompts that no completion has solved, in any group that was read."""
    always: list[str]
    """Ids of prompts that all completions solve."""

    @property
    def ks(self) -> list[int]:
        """Return all k of the table."""
        return sorted({k for passes in self.passes for k in passes.rates})


def diversity_of(run: RunResults, function: str) -> Diversity:
    """Compute the diversity of a run with completions, judged by one of its functions."""
    solved_from = run.solved_from[function]
    ends = ends_of(run)
    distinct = [f"{np.mean([distinct_answers(group, function) for group in groups]):.2f}" for groups in ends.values()]
    passes = [PassRates(label, pass_rates(groups, function, solved_from)) for label, groups in ends.items()]
    if run.kind == "evaluation":  # over all completions, even if not all were read
        passes = [PassRates("all samples", recorded_pass_rates(run.summary, function))]
    scores = scores_by_prompt(run.rows, function)
    return Diversity(
        run.name,
        function,
        solved_from,
        len(scores),
        " → ".join(distinct),
        passes,
        [prompt for prompt, values in scores.items() if max(values) < solved_from],
        [prompt for prompt, values in scores.items() if min(values) >= solved_from],
    )


def ends_of(run: RunResults) -> dict[str, list[list[LoggedRow]]]:
    """Return the groups of the first and the last tenth of the windows of a run, or all groups of an evaluation."""
    windows = list(run.windows.values())
    if len(windows) < 2:
        return {"all samples": [group for window in windows_of(run.rows).values() for group in window]}
    size = max(1, round(SHARE * len(windows)))
    parts = {"first windows": windows[:size], "last windows": windows[-size:]}
    return {label: [group for window in part for group in window] for label, part in parts.items()}


def pass_rates(groups: Sequence[Sequence[LoggedRow]], function: str, solved_from: float) -> dict[int, float]:
    """Compute pass@k over groups for k = 1, 2, 4, … up to the size of the largest group."""
    scores = {str(i): values_of(group, function) for i, group in enumerate(groups)}
    return pass_at({i: values for i, values in scores.items() if values}, max(map(len, groups)), solved_from)


def recorded_pass_rates(summary: Mapping[str, Any], function: str) -> dict[int, float]:
    """Return pass@k from an evaluation's summary."""
    prefix = f"rewards/{function}/pass@"
    return {int(name.removeprefix(prefix)): value for name, value in summary.items() if name.startswith(prefix)}


def scores_by_prompt(rows: Sequence[LoggedRow], function: str) -> dict[str, list[float]]:
    """Return the scores of each prompt in all its groups."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["sample_id"], []).extend(values_of([row], function))
    return {prompt: values for prompt, values in scores.items() if values}
