"""Find reward functions that give the same score to all completions of the two steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from rl_vlm.config.schema import RewardsConfig
from rl_vlm.data.check import UsableRows
from rl_vlm.errors import Finding, Severity
from rl_vlm.log.completions import window_paths
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.reward.golds import (
    columns_to_write,
    gold_columns,
    gold_completions,
    golds_of,
    score_texts,
    why_not_scored,
)
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import Diagnosis

KIND = "constant reward"
REMEDY = (
    "Look at what the function reads in a completion. `rl-vlm rewards check` scores gold answers and cheats with it, "
    "and with --completions N longer completions of the model."
)


def check_constant_rewards(
    config: RewardsConfig, usable: UsableRows, rows: Sequence[int], run: Path, diagnosis: Diagnosis
) -> None:
    """Note each function that gave the same score to all completions in the directory of a run.

    It is a finding if the gold answers of `rows` get this score too. Two cases are noted as checked instead: gold
    answers get other scores, or the score is 0 and the function reads no gold answers. The few short completions may
    then simply lack the text that the function looks for.
    """
    with RewardSuite(config) as suite:
        weights = dict(zip(suite.names, suite.weights, strict=True))
        for reward in suite.functions:
            scores = sampled_scores(run, reward.name)
            if len(scores) < 2 or len(set(scores)) > 1:
                continue
            tried = made_up_scores(reward, usable, rows)
            is_constant = set(tried) == set(scores)
            what = f"{reward.name} gives {scores[0]:g} to all {len(scores)} completions that the two steps sampled"
            if is_constant and (scores[0] or gold_columns(usable.rows.columns, [reward])):
                has_others = any(weight for name, weight in weights.items() if name != reward.name)
                severity: Severity = "warning" if has_others else "error"
                diagnosis.findings.append(Finding(severity, KIND, f"{what}, and to gold answers", REMEDY))
            else:
                others = f"; others get {min(tried):g} to {max(tried):g}" if tried else ""
                diagnosis.checked.append(f"scores of a few short completions: {what}{others}")


def sampled_scores(run: Path, name: str) -> list[float]:
    """Return a function's scores from the completions files of a run."""
    import pyarrow.parquet

    tables = [pyarrow.parquet.read_table(path) for path in window_paths(run)]
    columns = [table.column(name).to_pylist() for table in tables if name in table.column_names]
    return [score for column in columns for score in column if score is not None]


def made_up_scores(reward: Reward, usable: UsableRows, rows: Sequence[int]) -> list[float]:
    """Score the gold answers of rows in all forms, and an empty text. Return [] if `why_not_scored` gives a reason."""
    if why_not_scored(reward) is not None:
        return []
    columns = usable.rows.columns
    samples = [usable.rows[row] for row in rows]
    reward.form = reward.find_form(samples[0])
    found = []
    with random_states_kept(), chdir("."):
        for sample in samples:
            texts = ["", *gold_completions(golds_of(sample, columns_to_write(reward, columns))).values()]
            found += score_texts(reward, sample, texts, columns) if reward.applies(sample.columns) else []
    return [score for score in found if isinstance(score, float)]
