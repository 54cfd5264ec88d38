"""Report of a check: the figures, findings and oddest rows of each function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rewards.contract import Fault
from rl_vlm.tools.checks.diagnosis import Diagnosis
from rl_vlm.tools.checks.rewards.cheats import cheat_score, cheats_to_try
from rl_vlm.tools.checks.rewards.sampled import Sampled
from rl_vlm.tools.checks.rewards.trial import Trial
from rl_vlm.tools.checks.text import FUNCTION_KEYS, closing_line, finding_data, group_lines, grouped, note_lines

ODDEST = 10
WIDTH = 60
"""Number of characters of a completion that are shown."""


def figures(trial: Trial) -> dict[str, Any]:
    """Summarize scores, faults and times of a function as plain values. Times are seconds per completion."""
    numbers = trial.numbers()
    scores = [score for row in trial.rows for score in row.scores.values()]
    quartiles = np.quantile(numbers, [0, 0.25, 0.5, 0.75, 1]).tolist() if numbers else []
    spreads = [len({score for score in row.scores.values() if isinstance(score, float)}) for row in trial.rows]
    p50, p95, most = np.quantile(trial.seconds, [0.5, 0.95, 1]).tolist() if trial.seconds else (0.0, 0.0, 0.0)
    return {
        "function": trial.name,
        "rows": trial.num_rows,
        "rows_that_apply": len(trial.rows),
        "completions": len(scores),
        "not_applicable": sum(score is None for score in scores) / max(1, len(scores)),
        "faults": sum(isinstance(score, Fault) for score in scores) / max(1, len(scores)),
        "scores": dict(zip(("min", "p25", "median", "p75", "max"), quartiles, strict=False)),
        "groups_without_spread": sum(spread <= 1 for spread in spreads) / max(1, len(trial.rows)),
        "seconds": {"p50": p50, "p95": p95, "max": most},
    }


def oddest(trial: Trial) -> list[dict[str, Any]]:
    """Return the rows with the smallest margin of the gold answer over the best cheat, in ascending order."""
    odd = []
    for row in () if trial.not_compared else trial.rows:
        found = {name: cheat_score(row.scores, name) for name in cheats_to_try(trial.reads_gold)}
        cheats = {name: score for name, score in found.items() if score is not None}
        if row.best_gold is None or not cheats:
            continue
        best = max(cheats, key=lambda name: cheats[name])
        odd.append((row.best_gold - cheats[best], row.index, row.best_gold, best, cheats[best], row.texts[best]))
    names = ("margin", "row", "gold", "cheat", "score", "completion")
    return [dict(zip(names, each, strict=True)) for each in sorted(odd)[:ODDEST]]


def describe(functions: Sequence[Trial], sampled: Sampled | None, diagnosis: Diagnosis) -> str:
    """Return the report as text: notes, findings about the data, a section for each function and for sampled
    completions, and a count.

    A function that was left out has a section too if there are findings about it.
    """
    findings = diagnosis.findings
    heads: dict[str | None, list[str]] = {None: list(note_lines(diagnosis))}
    heads |= {each.name: figure_lines(each) for each in functions}
    heads |= {"all": [sampled_line(sampled)]} if sampled else {}
    for name in (finding.function for finding in findings):
        heads.setdefault(name, [str(name)])
    rows = {each.name: oddest_lines(each) for each in functions}
    sections = []
    for name, head in heads.items():
        mine = [line for group in grouped(f for f in findings if f.function == name) for line in group_lines(group)]
        sections.append([*head, *(f"  {line}" if name else line for line in mine), *rows.get(name or "", [])])
    return "\n\n".join([*map("\n".join, filter(None, sections)), closing_line(findings)])


def figure_lines(trial: Trial) -> list[str]:
    """Return the figures of a function as lines."""
    found = figures(trial)
    seconds = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in found["seconds"].items())
    return [
        found["function"],
        f"  rows                   {found['rows_that_apply']} of {found['rows']}, {found['completions']} completions",
        f"  does not apply         {found['not_applicable']:.1%}",
        f"  faults                 {found['faults']:.1%}",
        f"  scores                 {', '.join(f'{name} {value:.3g}' for name, value in found['scores'].items())}",
        f"  groups without spread  {found['groups_without_spread']:.1%}",
        f"  ms per completion      {seconds}",
    ]


def oddest_lines(trial: Trial) -> list[str]:
    """Return the oddest rows of a function as lines, under a heading."""
    lines = []
    for row in oddest(trial):
        text = " ".join(row["completion"].split())[:WIDTH]
        lines.append(f"    row {row['row']}: {row['gold']:.3g}, {row['score']:.3g} for {row['cheat']!r} {text!r}")
    heading = "  oddest rows: score of the gold answer, and of the completion that gets the most without it"
    return [heading, *lines] if lines else []


def sampled_line(sampled: Sampled) -> str:
    """Describe the completions of the initial model in one line."""
    reward = "none" if sampled.reward is None else f"{sampled.reward:.3g}"
    return (
        f"the initial model: {sampled.completions} completions of {sampled.groups} rows, mean reward {reward}, "
        f"{sampled.groups_without_spread:.1%} of the groups without spread, {sampled.cut_off:.1%} cut off"
    )


def reward_data(functions: Sequence[Trial], sampled: Sampled | None, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the report as plain values."""
    shown = [figures(each) | {"oddest": oddest(each)} for each in functions]
    lines = {"checked": diagnosis.checked, "not_checked": diagnosis.not_checked}
    data = {"functions": shown, **lines, "findings": finding_data(diagnosis.findings, FUNCTION_KEYS)}
    return data | {"sampled": vars(sampled)} if sampled else data
