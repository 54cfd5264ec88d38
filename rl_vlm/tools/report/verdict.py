"""The verdict on a run in words, with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.evaluation.figures import BOOTSTRAP_RESAMPLES
from rl_vlm.log.metrics import function_name, is_score, named_with, reward_faults, totals
from rl_vlm.reward.suite import NOT_APPLICABLE
from rl_vlm.tools.report.read import RunResults, values_of

SHARE = 0.1
"""Share of a run's windows at each of the two ends that are compared. An end has at least one window."""
ENOUGH, FEWEST = 16, 8
"""Ends are widened until each has `ENOUGH` values. With fewer than `FEWEST`, a bootstrap interval is too narrow."""


@dataclass(frozen=True)
class Fact:
    """One figure of the verdict."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one run."""

    name: str
    sentence: str
    facts: list[Fact]
    method: str
    """How the interval of the reward was computed."""


@dataclass(frozen=True)
class Change:
    """The means of the first and the last values, with a 95% interval of their difference."""

    before: float
    after: float
    low: float
    high: float
    num: int
    """Number of values at the end with fewer of them."""

    @property
    def word(self) -> str:
        if self.num < FEWEST:
            return "Reward, too few values to judge"
        return "Reward " + ("rose" if self.low > 0 else "fell" if self.high < 0 else "did not change measurably")


def verdict_of(run: RunResults) -> Verdict:
    """Judge a run or an evaluation."""
    faults, dropped = num_faults(run), len(run.dropped)
    common = [
        Fact("rows skipped", str(dropped), "left out of the data"),
        Fact("reward faults", f"{faults:.0f}", "of functions on completions"),
    ]
    counted = f"{plural(dropped, 'row')} skipped; {plural(faults, 'reward fault')}"
    if run.kind == "evaluation":
        facts = [score_fact(run.summary, name, function_name(name)) for name in run.summary if is_score(name)]
        words = [f"{fact.label} {fact.value} ({fact.note})" for fact in facts] or ["no completion has a score"]
        samples = f"{run.summary.get('num_samples', 0):.0f} samples"
        return Verdict(run.name, f"{samples}: {'; '.join(words)}; {counted}.", [*facts, *common], OF_EVALUATION)
    change, method = reward_change(run)
    held_out = held_out_facts(run)
    sentence = "No completion has a reward yet" if change is None else f"{change.word}: {changed(change)}"
    first, _ = steps_of(run)
    if first > 1:
        sentence = f"From step {first:,} on: {sentence}"
    words = [f"held out {fact.label} {fact.value}" for fact in held_out]
    facts = [Fact("reward", arrow(change.before, change.after), interval(change))] if change else []
    return Verdict(
        run.name,
        "; ".join([sentence, *words, counted]) + ".",
        [*facts, *(Fact(f"held out {f.label}", f.value, f.note) for f in held_out), *common, *progress_facts(run)],
        method,
    )


OF_EVALUATION = "95% intervals are bootstrap intervals of the mean over samples (percentiles of 1,000 resamples)."


def reward_change(run: RunResults) -> tuple[Change | None, str]:
    """Compare the rewards of the first and the last tenth of a run. Returns the change and a sentence on the method."""
    windows = run.windows.values()
    if windows:
        size, before, after = both_ends([group_means(groups) for groups in windows])
        what = f"prompts of the first and the last {some(size, 'generation window')}"
    else:
        size, before, after = both_ends([[x] for line in run.lines if (x := line.get("reward")) is not None])
        what = f"the first and the last {some(size, 'step')}"
    if not before or not after:
        return None, ""
    resampled = f"(percentiles of {BOOTSTRAP_RESAMPLES:,} resamples)"
    return (
        bootstrap_change(before, after),
        f"The reward is the mean over {what}; its 95% interval is that of the "
        f"difference, by a bootstrap over them {resampled}.",
    )


def both_ends(parts: Sequence[Sequence[float]]) -> tuple[int, list[float], list[float]]:
    """Return the number of parts at each end of a run, the values of the first end, and the values of the last.

    Ends overlap only if there is a single part.
    """
    size = max(1, round(SHARE * len(parts)))
    while True:
        before, after = ([value for part in some for value in part] for some in (parts[:size], parts[-size:]))
        if min(len(before), len(after)) >= ENOUGH or 2 * (size + 1) > len(parts):
            return size, before, after
        size += 1


def group_means(groups: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """Return the mean reward of each group that has one."""
    return [float(np.mean(values)) for group in groups if (values := values_of(group, "reward"))]


def bootstrap_change(before: Sequence[float], after: Sequence[float]) -> Change:
    """Compute the difference of two means with its 95% percentile bootstrap interval."""
    generator = np.random.default_rng(0)
    means = [
        generator.choice(values, size=(BOOTSTRAP_RESAMPLES, len(values))).mean(axis=1) for values in (before, after)
    ]
    low, high = np.percentile(means[1] - means[0], [2.5, 97.5])
    num = min(len(before), len(after))
    return Change(float(np.mean(before)), float(np.mean(after)), float(low), float(high), num)


def changed(change: Change) -> str:
    return f"{arrow(change.before, change.after)} ({interval(change)})"


def arrow(before: float, after: float) -> str:
    digits = digits_of(before, after)
    return f"{before:.{digits}f} → {after:.{digits}f}"


def digits_of(*values: float) -> int:
    """Return how many decimals show two digits of the largest value, at least 2."""
    size = max(map(abs, values))
    return 2 if size == 0 else max(2, 1 - math.floor(math.log10(size)))


def interval(change: Change) -> str:
    digits = digits_of(change.before, change.after)
    difference = f"change {change.after - change.before:+.{digits}f}"
    if change.num < FEWEST:
        return f"{difference}, {plural(change.num, 'value')} at an end"
    return f"{difference}, 95% interval {change.low:+.{digits}f} to {change.high:+.{digits}f}"


def held_out_facts(run: RunResults) -> list[Fact]:
    """Return each function's held-out score at the first evaluation and for the model that the run ends with.

    If both are one evaluation, return its scores.
    """
    evaluated = {line["step"]: line for line in run.lines if "eval_num_samples" in line}
    if not evaluated:
        return []
    first, last = min(evaluated), result_step(run, evaluated)
    facts = []
    for name in evaluated[last]:
        if not is_score(name) or not name.startswith("eval_"):
            continue
        fact = score_fact(evaluated[last], name, function_name(name))
        before = evaluated[first].get(name)
        if before is not None and last > first:
            note = (
                f"steps {first:,} and {last:,}; the latter: {fact.note}"
                if fact.note
                else f"steps {first:,} and {last:,}"
            )
            fact = Fact(fact.label, arrow(before, evaluated[last][name]), note)
        facts.append(fact)
    return facts


def result_step(run: RunResults, evaluated: Collection[int]) -> int:
    """Return the step at which the run's result was evaluated: the best step if it is loaded, or else the latest."""
    best = Path(run.summary.get("checkpoint", "")).name.removeprefix("checkpoint-")
    return int(best) if best.isdecimal() and int(best) in evaluated else max(evaluated)


def steps_of(run: RunResults) -> tuple[int, int]:
    """Return the first and the last step in a run's metrics. Steps before a resume in another directory are absent."""
    steps = [line["step"] for line in run.lines]
    return min((step for step in steps if step > 0), default=0), max(steps, default=0)


def score_fact(metrics: Mapping[str, Any], name: str, label: str) -> Fact:
    """Return a mean score with its interval, and pass@k at the largest k beyond 1."""
    prefix = name.removesuffix("mean")
    note = ""
    if f"{prefix}ci_low" in metrics:
        note = f"95% interval {metrics[f'{prefix}ci_low']:.2f} to {metrics[f'{prefix}ci_high']:.2f}"
    ks = [int(key.removeprefix(f"{prefix}pass@")) for key in metrics if key.startswith(f"{prefix}pass@")]
    if ks and max(ks) > 1:
        note = f"{note}, pass@{max(ks)} {metrics[f'{prefix}pass@{max(ks)}']:.2f}".strip(", ")
    return Fact(label, f"{metrics[name]:.{digits_of(metrics[name])}f}", note)


def fault_counts(run: RunResults) -> dict[str, float]:
    """Count completions by the fault of a reward function. Held-out completions of a run are counted separately."""
    if run.kind == "evaluation":
        return reward_faults(run.summary)
    counts = Counter(totals(run.lines)["reward_faults"])
    for line in run.lines:
        counts.update({f"{name} (held out)": count for name, count in named_with("eval_reward_faults/", line).items()})
    return dict(counts)


def num_faults(run: RunResults) -> float:
    """Return the number of faults of reward functions. A completion to which no function applies is not a fault."""
    return sum((count for name, count in fault_counts(run).items() if NOT_APPLICABLE not in name), 0.0)


def progress_facts(run: RunResults) -> list[Fact]:
    """Return how far a run is, and its skipped updates."""
    first, last = steps_of(run)
    skipped = totals(run.lines)["skipped_updates"]
    total = run.settings.get("train", {}).get("max_steps")
    state = "complete" if run.summary else f"of {total}, running or stopped" if total else "running or stopped"
    if first > 1:
        state = f"{state}; those before {first:,} are in another directory"
    reasons = ", ".join(f"{reason.replace('_', ' ')} {count:.0f}" for reason, count in skipped.items() if count)
    return [
        Fact("optimizer steps", str(last), state),
        Fact("steps without an update", f"{sum(skipped.values()):.0f}", reasons or "none was skipped"),
    ]


def some(number: int, noun: str) -> str:
    return noun if number == 1 else f"{number} {noun}s"


def plural(number: int | float, noun: str) -> str:
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"
