"""Find problems of a reward function from its scores, with one check for each kind of problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

from rewards.contract import Fault
from rl_vlm.config.schema import DataConfig, RewardsConfig, RunConfig
from rl_vlm.errors import Finding
from rl_vlm.reward.golds import is_below
from rl_vlm.tools.checks.diagnosis import Checking, Diagnosis, collect
from rl_vlm.tools.checks.rewards.cheats import HEDGES, HOLLOW, SILENT, cheat_score, cheats_to_try
from rl_vlm.tools.checks.rewards.sampled import Sampled, sample_completions
from rl_vlm.tools.checks.rewards.trial import Trial, try_functions

if TYPE_CHECKING:
    from rl_vlm.data.prompts import PromptBuilder

SLOW_SECONDS = 0.1
"""Seconds per completion. At this speed, 512 completions take as long as a training step."""
MANY_ROWS = 0.2
"""A cheat is a finding if it pays on more than this share of the rows. Some wrong answers are right by chance."""
LARGER = 20.0
"""If the weighted ranges of two functions differ by more than this factor, the smaller one has little effect."""


def examine_functions(
    data: DataConfig,
    rewards: RewardsConfig,
    num_rows: int,
    run: RunConfig | None = None,
    builder: PromptBuilder | None = None,
    num_sampled: int = 0,
) -> tuple[list[Trial], Sampled | None, Diagnosis]:
    """Check functions on made-up completions, as `try_functions` does.

    With `num_sampled`, also check completions of this number of rows that the initial model of `run` samples.
    """
    functions: list[Trial] = []
    found: list[Sampled] = []

    def check() -> Checking[None]:
        has_tools = run is not None and run.rollout.has_tools
        functions.extend((yield from try_functions(data, rewards, num_rows, builder, has_tools)))
        yield from function_findings(functions)
        if run is not None and num_sampled:
            found.append(sample_completions(run, num_sampled))
            yield from found[0].findings()

    diagnosis = collect(check())
    return functions, next(iter(found), None), diagnosis


def function_findings(functions: Sequence[Trial]) -> Iterator[Finding]:
    """Yield the findings about each function, and about their scales."""
    for trial in functions:
        yield from findings_of(trial)
    yield from unlike_scales(functions)


def findings_of(trial: Trial) -> Iterator[Finding]:
    """Yield the findings about one function."""
    if not trial.rows:
        message = "it applies to no row: look at applies_to, and at the columns that it reads"
        yield Finding("error", "never applies", message, function=trial.name)
        return
    for check in (faults, empty_columns, not_deterministic, slow):
        yield from check(trial)
    if trial.not_compared:
        return
    if not trial.numbers():
        message = "it gives no completion a number: it fails, or returns None, for all of them"
        yield Finding("error", "no score", message, function=trial.name)
    elif len(set(trial.numbers())) == 1:
        yield constant(trial)
    else:
        for check in (inverted, low_golds, paying_cheats):
            yield from check(trial)


def faults(trial: Trial) -> Iterator[Finding]:
    """Yield a finding for the rows on which every completion fails, and one for each other completion that fails."""
    every: list[tuple[int, Fault]] = []
    by_completion: dict[str, list[tuple[int, Fault]]] = {}
    for row in trial.rows:
        found = {name: score for name, score in row.scores.items() if isinstance(score, Fault)}
        if len(found) == len(row.scores):
            every.append((row.index, next(iter(found.values()))))
            continue
        for name, score in found.items():
            by_completion.setdefault(name, []).append((row.index, score))
    num = len(trial.rows)
    if every:
        where = "" if len(every) == num else f" of {len(every)} of {num} rows"
        yield fault_finding(trial, f"it fails on every completion{where}, which are masked", every)
    for name, failed in by_completion.items():
        what = f"it fails on the completion {name!r} of {len(failed)} of {num} rows, which are masked"
        yield fault_finding(trial, what, failed)


def fault_finding(trial: Trial, what: str, failed: Sequence[tuple[int, Fault]]) -> Finding:
    """Build the finding about failed completions. `failed` holds (row, fault) pairs."""
    kind, _ = Counter(fault.kind for _, fault in failed).most_common(1)[0]
    message = f"{what}: {failed[0][1].message}. Return a low score instead, or None if it does not apply"
    return Finding("error", f"fault: {kind}", message, function=trial.name, rows=tuple(row for row, _ in failed))


def empty_columns(trial: Trial) -> Iterator[Finding]:
    for column in trial.empty_columns:
        message = f"it names the column {column!r}, and no row has a value in it: is the name right?"
        yield Finding("warning", "empty column", message, function=trial.name)


def not_deterministic(trial: Trial) -> Iterator[Finding]:
    if trial.num_unequal:
        message = f"a second call gave other scores on {trial.num_unequal} rows: a resumed run would differ"
        yield Finding("warning", "not deterministic", message, function=trial.name)


def slow(trial: Trial) -> Iterator[Finding]:
    p95 = float(np.quantile(trial.seconds, 0.95))
    if p95 > SLOW_SECONDS:
        message = (
            f"it takes {p95:.2f} s per completion (95th percentile): 512 completions take {512 * p95:.0f} s. Give it a "
            "timeout, or make it async"
        )
        yield Finding("warning", "slow", message, function=trial.name)


def constant(trial: Trial) -> Finding:
    """Build the finding that all scores are equal. It is a warning if they are 0, as a penalty's may be."""
    (value,) = set(trial.numbers())
    message = (
        f"it gives {value:g} to every completion, gold answers and empty ones alike: no group has anything to learn "
        "from it. Look at the column that it compares with, and at how it finds the answer"
    )
    return Finding("error" if value or trial.reads_gold else "warning", "constant", message, function=trial.name)


def inverted(trial: Trial) -> Iterator[Finding]:
    """Yield a finding if gold answers get less than completions that say nothing."""
    golds = [row.best_gold for row in trial.rows if row.best_gold is not None]
    silent = [name for name in cheats_to_try(trial.reads_gold) if name in SILENT | HOLLOW]
    worthless = [s for row in trial.rows for s in map(row.scores.get, silent) if isinstance(s, float)]
    if golds and worthless and mean(golds) < mean(worthless):
        message = (
            f"gold answers get {mean(golds):.3g} on average, and completions that say nothing {mean(worthless):.3g}: "
            "is its sign right?"
        )
        yield Finding("error", "inverted", message, function=trial.name)


def low_golds(trial: Trial) -> Iterator[Finding]:
    """Yield a finding if the gold answers of some rows get less than the best gold answer."""
    golds = {row.index: row.best_gold for row in trial.rows}
    best = max((gold for gold in golds.values() if gold is not None), default=0.0)
    low = [row for row, gold in golds.items() if gold is not None and is_below(gold, best)]
    if low and trial.reads_gold:
        message = (
            f"the gold answers of {len(low)} of {len(golds)} rows get less than the best, {best:g}: these rows can "
            "hardly be learned. Mend their gold answers, or how the function reads them"
        )
        yield Finding("warning", "low gold", message, function=trial.name, rows=tuple(low))


def paying_cheats(trial: Trial) -> Iterator[Finding]:
    """Yield a finding for each cheat that gets as much as the gold answer on many rows.

    It is a warning if the function reads no gold answer, or if the cheat contains the gold answer. Penalties (scores
    ≤ 0, no gold answer) are exempt: they may ignore empty completions.
    """
    if not trial.reads_gold and max(trial.numbers()) <= 0:
        return
    for name in cheats_to_try(trial.reads_gold):
        pairs = [
            (row.index, score, row.best_gold)
            for row in trial.rows
            if (score := cheat_score(row.scores, name)) is not None and row.best_gold is not None
        ]
        paid = [row for row, score, gold in pairs if not is_below(score, gold)]
        if len(paid) > MANY_ROWS * len(pairs):
            message = (
                f"the completion {name!r} gets as much as the gold answer on {len(paid)} of {len(pairs)} rows: a "
                "policy will find it. Compare the whole answer, and score other text 0"
            )
            severity = "error" if name not in HEDGES and trial.reads_gold else "warning"
            yield Finding(severity, f"cheat: {name}", message, function=trial.name, rows=tuple(paid))


def unlike_scales(functions: Sequence[Trial]) -> Iterator[Finding]:
    """Yield a finding for each function whose weighted range is more than `LARGER` times another's."""
    ranges = {f.name: abs(f.weight) * float(np.ptp(f.numbers())) for f in functions if f.numbers()}
    ranges = {name: size for name, size in ranges.items() if size}
    for name, size in ranges.items():
        smaller = [other for other, its in ranges.items() if size > LARGER * its]
        if smaller:
            message = (
                f"its weighted scores span {size:g}, more than {LARGER:g} times the range of {', '.join(smaller)}, "
                "which then has little effect: set `weight`"
            )
            yield Finding("warning", "scale", message, function=name)
