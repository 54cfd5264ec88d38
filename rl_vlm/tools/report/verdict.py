"""The verdict on a run as a page shows it: a title, the main figure, all changes, and further facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_vlm.log.changes import Change, ScoreSplit, digits_of, interval, text_of
from rl_vlm.log.metrics import function_name, is_score, named_with, reward_faults, seconds_of, totals
from rl_vlm.reward.suite import NOT_APPLICABLE
from rl_vlm.run.evidence import read_evidence
from rl_vlm.run.outcome import explained, headline
from rl_vlm.run.verdict import Evidence, Outcome, judge
from rl_vlm.stages import Stage
from rl_vlm.tools.report.draw import Spark
from rl_vlm.tools.report.read import RunResults

SIGNS = {
    Outcome.LEARNED: ("good", "↑"),
    Outcome.UNCHANGED: ("even", "="),
    Outcome.SHORT: ("even", "?"),
    Outcome.WORSE: ("bad", "↓"),
    Outcome.COLLAPSED: ("bad", "!"),
    Outcome.CONSTANT: ("bad", "!"),
    Outcome.FAULTY: ("bad", "!"),
}
"""The state of each outcome, which has a colour, and its mark."""
TRAINING, BEST = "Training reward", "Best reward of a group"
OF_RUNS = (
    "95% intervals are bootstrap intervals (percentiles of 1,000 resamples): of held-out figures over the same rows "
    "before and after, of training figures over the first and the last tenth of the generation windows, or more "
    "of them if these are few. They show chance in the choice of rows and in sampling, and not the result of another "
    "seed."
)
OF_EVALUATIONS = "95% intervals are bootstrap intervals of the mean over samples (percentiles of 1,000 resamples)."


@dataclass(frozen=True)
class Fact:
    """A further figure."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Moved:
    """A change as text. An evaluation has no value before."""

    name: str
    split: ScoreSplit | None
    before: str | None
    after: str
    interval: str = ""
    """The 95% interval of the change, or of the single value."""
    word: str = ""

    @property
    def label(self) -> str:
        return capitalized(self.name if self.split is None else f"{self.split} {self.name}")

    @property
    def values(self) -> str:
        return self.after if self.before is None else f"{self.before} → {self.after}"


@dataclass(frozen=True)
class Judged:
    """The verdict on one run, or the scores of an evaluation."""

    name: str
    title: str
    state: str
    mark: str
    sentence: str
    moved: list[Moved]
    """The first is the main figure."""
    facts: list[Fact]
    method: str
    steps: str = ""
    minutes: str = ""
    is_complete: bool = True
    path: Path = field(default_factory=Path)

    @property
    def by_label(self) -> dict[str, Moved]:
        return {moved.label: moved for moved in self.moved}


def columns_of(verdicts: Sequence[Judged]) -> list[str]:
    """Return the labels of the figures in a comparison. Training scores are left out if they are also held out."""
    figures = {moved.label: moved for judged in verdicts for moved in judged.moved}
    held_out = {moved.name for moved in figures.values() if moved.split == "held-out"}
    repeated = {label for label, moved in figures.items() if moved.split == "training" and moved.name in held_out}
    return [label for label in figures if label == TRAINING or label not in {*repeated, BEST}]


@dataclass(frozen=True)
class RunRow:
    """A run in a table of runs."""

    judged: Judged
    cells: list[Moved | None]
    """A cell per column of figures."""
    link: str | None = None
    spark: Spark | None = None


def verdict_of(run: RunResults) -> Judged:
    """Judge a run as the last lines of the terminal do, or show the scores of an evaluation."""
    if run.kind == "evaluation":
        return scores_of(run)
    verdict = judge(evidence_of(run))
    state, mark = SIGNS[verdict.outcome]
    moved = [moved_of(change) for change in verdict.changes]
    last = max((line["step"] for line in run.lines), default=0)
    total = run.settings.get("train", {}).get("max_steps")
    return Judged(
        run.name,
        capitalized(headline(verdict)),
        state,
        mark,
        explained(verdict),
        [*moved, *(held_out_scores(run) if not any(change.split == "held-out" for change in verdict.changes) else [])],
        [*pass_facts(run), *problem_facts(run)],
        OF_RUNS,
        f"{last:,} of {total:,}" if total else f"{last:,}",
        minutes_of(run),
        bool(run.summary),
        run.path,
    )


def evidence_of(run: RunResults) -> Evidence:
    """Read the evidence for the steps that `run.lines` has, which may be the first steps of the run."""
    evaluated = [line["step"] for line in run.lines if "eval_num_samples" in line]
    result = result_step(run, evaluated) if evaluated else None
    num_generations = run.settings.get("rollout", {}).get("num_generations")
    return read_evidence(run.path, run.lines, result, run.decisive[0] if run.decisive else None, num_generations)


def moved_of(change: Change) -> Moved:
    """Return a change as text."""
    before, after = text_of(change)
    word = "" if change.low is None or change.high is None or change.has_few else (
        "rose" if change.low > 0 else "fell" if change.high < 0 else "no clear change"
    )  # fmt: skip
    return Moved(change.name, change.split, before, after, interval(change), word)


def held_out_scores(run: RunResults) -> list[Moved]:
    """Return the held-out reward and scores at the first evaluation and for the model that the run ends with.

    They have no interval of the change, since the completions of the evaluations are not logged. If both are one
    evaluation, return its scores.
    """
    (before, after), found = held_out_metrics(run), []
    names = sorted(filter(is_score, after), key=lambda name: function_name(name) not in run.decisive)
    for name in ("eval_reward", *names):
        if name not in after:
            continue
        score = score_of(after, name, "reward" if name == "eval_reward" else function_name(name))
        if before.get(name) is not None:
            digits = digits_of(before[name], after[name])
            note = f"the latter: {score.interval}" if score.interval else ""
            score = replace(
                score, before=f"{before[name]:.{digits}f}", after=f"{after[name]:.{digits}f}", interval=note
            )
        found.append(score)
    return found


def held_out_metrics(run: RunResults) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the metrics of the first evaluation and of the model that the run ends with.

    If both are one evaluation, the former are empty. Without evaluations, both are.
    """
    evaluated = {line["step"]: line for line in run.lines if "eval_num_samples" in line}
    if not evaluated:
        return {}, {}
    first, last = min(evaluated), result_step(run, evaluated)
    return evaluated[first] if last > first else {}, evaluated[last]


def score_of(metrics: Mapping[str, Any], metric: str, name: str) -> Moved:
    """Return a held-out mean score with its interval."""
    prefix = metric.removesuffix("mean")
    low, high = metrics.get(f"{prefix}ci_low"), metrics.get(f"{prefix}ci_high")
    known = "" if low is None or high is None else f"{low:.2f} to {high:.2f}"
    return Moved(name, "held-out", None, f"{metrics[metric]:.{digits_of(metrics[metric])}f}", known)


def scores_of(run: RunResults) -> Judged:
    """Show the scores of an evaluation. The functions with the largest weight come first."""
    names = [name for name in run.summary if is_score(name)]
    names.sort(key=lambda name: function_name(name) not in run.decisive)
    scores = [score_of(run.summary, name, function_name(name)) for name in names]
    samples = f"{(num := run.summary.get('num_samples', 0)):,.0f} sample{'' if num == 1 else 's'}"
    return Judged(
        run.name,
        f"Evaluated on {samples}",
        "even",
        "%",
        "" if scores else "No completion has a score.",
        scores,
        [*passes_of(run.summary, "", {}), *problem_facts(run)],
        OF_EVALUATIONS,
        path=run.path,
    )


def result_step(run: RunResults, evaluated: Collection[int]) -> int:
    """Return the step at which the run's result was evaluated: the best step if it is loaded, or else the latest."""
    best = Path(run.summary.get("checkpoint", "")).name.removeprefix("checkpoint-")
    return int(best) if best.isdecimal() and int(best) in evaluated else max(evaluated)


def minutes_of(run: RunResults) -> str:
    """Return the minutes that the run's steps took, or nothing if they were not timed."""
    seconds = [line[name] for line in run.lines if (name := seconds_of(Stage.STEP)) in line]
    return f"{sum(seconds) / 60:.1f}" if seconds else ""


def pass_facts(run: RunResults) -> list[Fact]:
    """Return held-out pass@k at the first evaluation and for the model that the run ends with."""
    before, after = held_out_metrics(run)
    return passes_of(after, "eval_", before)


def passes_of(metrics: Mapping[str, Any], prefix: str, before: Mapping[str, Any]) -> list[Fact]:
    """Return each function's pass@k at the largest k beyond 1, with the value before if there is one."""
    facts = []
    for name in (name for name in metrics if is_score(name) and name.startswith(f"{prefix}rewards/")):
        start = f"{name.removesuffix('mean')}pass@"
        k = max((int(key.removeprefix(start)) for key in metrics if key.startswith(start)), default=1)
        if k > 1:
            values = [some[f"{start}{k}"] for some in (before, metrics) if f"{start}{k}" in some]
            text = " → ".join(f"{value:.2f}" for value in values)
            facts.append(Fact(f"Held-out pass@{k}", text, function_name(name)))
    return facts


def fault_counts(run: RunResults) -> dict[str, float]:
    """Count completions by the fault of a reward function. Held-out completions of a run are counted separately."""
    if run.kind == "evaluation":
        return reward_faults(run.summary)
    counts = Counter(totals(run.lines)["reward_faults"])
    for line in run.lines:
        counts.update({f"{name} (held out)": count for name, count in named_with("eval_reward_faults/", line).items()})
    return dict(counts)


def problem_facts(run: RunResults) -> list[Fact]:
    """Return the numbers of rows, completions and steps that were not used. A number that is 0 is left out."""
    skipped = totals(run.lines)["skipped_updates"]
    reasons = ", ".join(f"{reason.replace('_', ' ')} {count:.0f}" for reason, count in skipped.items() if count)
    # A completion to which no function applies is not a fault.
    num_faults = sum(count for name, count in fault_counts(run).items() if NOT_APPLICABLE not in name)
    numbers = (
        ("Rows skipped", len(run.dropped), "left out of the data"),
        ("Reward faults", num_faults, "of functions on completions"),
        ("Steps without an update", sum(skipped.values()), reasons),
    )
    return [Fact(label, f"{number:,.0f}", note) for label, number, note in numbers if number]


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
