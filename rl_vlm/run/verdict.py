"""The verdict on a training run: one word, and the figures behind it.

    rewards faulty    functions failed on `MOST_FAULTED` of the completions or more
    rewards constant  no group ever had two different rewards
    collapsed         groups have lost their spread, far below the best completions of the first groups
    learned, worse    the interval of the change lies above 0, or below
    unchanged         it contains 0
    too short         there are not enough values, or not enough steps, to say so

The first that holds is the verdict. The change is the held-out reward's, row by row, from the first evaluation to the
model that the run ends with. Without two evaluations, it is the training reward's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from rl_vlm.evaluation.figures import BOOTSTRAP_RESAMPLES
from rl_vlm.log.metrics import (
    BEST_OF_GROUP,
    DISTINCT_ANSWERS,
    FAULTED,
    WITHOUT_VARIANCE,
    function_name,
    is_score,
)

Line = Mapping[str, Any]
Pairs = tuple[Sequence[float], Sequence[float]]

MOST_FAULTED = 0.05
"""Completions without a score are left out of training. This many of them are a fault to mend, and not an accident."""
FEWEST_STEPS = 10
"""With fewer steps, a change says nothing of the settings. One in twenty intervals lies above or below 0 by chance."""
SHARE = 0.1
"""Share of a run's windows at each of the two ends that are compared. The mean over a window's groups is one value."""
FEWEST = 8
"""An end has at least so many values, if both can. With fewer, a bootstrap interval is too narrow."""

FIRST_STEPS = 4
"""Steps whose groups show the answers that the starting model can find. Their mean is over dozens of groups."""
LAST_STEPS, LAST_SHARE = 8, 0.05
"""A collapse is judged over so many steps, or this share of the run. Single steps vary."""
MOST_CONSTANT = 0.6
"""More than this share of groups without variance is a loss of spread, if answers are lost as well."""
LEAST_SPREAD = 0.2
"""Answers are lost if the distinct ones of a group beyond the first have fallen below this share of the start."""
SAME_SPREAD, LEAST_GROWTH = 0.9, 0.2
"""If more than this share of the distinct answers is left, they are texts without a form. Then the share of groups
without variance must have grown by so much: prompts that are too easy or too hard have none from the start."""
MOST_REALIZED = 0.75
"""A run that has come this far from its first reward to the best of its first groups has used its exploration."""
LEAST_MISSING = 0.25
"""A reward that misses the best of the first groups by less than this many standard deviations is at its end."""

SPREAD = {
    DISTINCT_ANSWERS: "distinct answers of a group",
    WITHOUT_VARIANCE: "share of groups without variance",
    BEST_OF_GROUP: "best reward of a group",
}
"""The metrics that show the spread of groups."""


class Outcome(StrEnum):
    """The word of a verdict."""

    LEARNED = "learned"
    UNCHANGED = "unchanged"
    WORSE = "worse"
    COLLAPSED = "collapsed"
    CONSTANT = "rewards constant"
    FAULTY = "rewards faulty"
    SHORT = "too short to tell"


@dataclass(frozen=True)
class Change:
    """The means of values before and after, with a 95% interval of their difference."""

    name: str
    before: float
    after: float
    low: float | None = None
    high: float | None = None
    num: int | None = None
    """Number of values: of pairs, or of values at the end that has fewer of them."""

    @property
    def has_few(self) -> bool:
        """Whether its interval is of so few values that it would be too narrow."""
        return self.num is not None and self.num < FEWEST


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run, with the figures behind it."""

    outcome: Outcome
    step: int | None
    """The step at which a collapse began."""
    is_evaluated: bool
    """Whether held-out rows were evaluated. Otherwise training data alone are judged."""
    changes: list[Change]
    """The figures behind the verdict. The first decides between learned, unchanged and worse."""
    lacks: list[str] = field(default_factory=list)
    """Sentences on missing data and their consequence."""

    @property
    def title(self) -> str:
        """Return the word, with the step of a collapse."""
        return f"{self.outcome.value} at step {self.step:,}" if self.step is not None else self.outcome.value

    def as_json(self) -> dict[str, Any]:
        """Return the verdict for `summary.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """Restore `as_json`."""
        changes = [Change(**change) for change in values["changes"]]
        return cls(**{**values, "outcome": Outcome(values["outcome"]), "changes": changes})


@dataclass(frozen=True)
class Evidence:
    """The data that a verdict is computed from."""

    lines: Sequence[Line]
    """Lines of `metrics.jsonl`, with the metrics of groups."""
    held_out: Mapping[str, Pairs] = field(default_factory=dict)
    """Mean values of the same held-out rows at the first evaluation, and with the model that the run ends with: of
    `reward`, and of each reward function. Empty without two evaluations whose completions are logged."""
    num_evaluations: int = 0
    lacks: list[str] = field(default_factory=list)


def judge(evidence: Evidence) -> Verdict:
    """Judge a run."""
    steps = training_steps(evidence.lines)
    held_out = [paired_change(f"held-out {name}", *pairs) for name, pairs in evidence.held_out.items()]
    rewards = [*held_out, *training_changes(steps)]
    watch = CollapseWatch(len(steps))
    for line in steps:
        watch.add(line)
    outcome = (
        Outcome.FAULTY if mean_of(steps, FAULTED) >= MOST_FAULTED
        else Outcome.CONSTANT if steps and all(line.get(WITHOUT_VARIANCE) == 1.0 for line in steps)
        else Outcome.COLLAPSED if watch.since is not None
        else word_of(rewards[0] if rewards else None, len(steps))
    )  # fmt: skip
    return Verdict(
        outcome,
        watch.since if outcome == Outcome.COLLAPSED else None,
        evidence.num_evaluations > 0,
        [*rewards, *watch.changes()],
        list(evidence.lacks),
    )


def word_of(change: Change | None, num_steps: int) -> Outcome:
    """Return whether a run learned, by the interval of its change."""
    if num_steps < FEWEST_STEPS or change is None or change.has_few:
        return Outcome.SHORT
    if change.low is not None and change.low > 0:
        return Outcome.LEARNED
    return Outcome.WORSE if change.high is not None and change.high < 0 else Outcome.UNCHANGED


def training_steps(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of optimizer steps whose groups have a reward."""
    return [line for line in lines if line["step"] > 0 and is_number(line.get("reward"))]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def mean_of(lines: Iterable[Line], metric: str) -> float:
    """Return the mean of a metric over the lines that have it, or NaN if none has."""
    values = [line[metric] for line in lines if is_number(line.get(metric))]
    return float(np.mean(values)) if values else math.nan


def paired_change(name: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """Return the change of values that are paired, with the percentile bootstrap interval of its mean over pairs."""
    pairs = np.array([before, after], dtype=float)
    generator = np.random.default_rng(0)
    drawn = generator.integers(pairs.shape[1], size=(BOOTSTRAP_RESAMPLES, pairs.shape[1]))
    low, high = np.percentile((pairs[1] - pairs[0])[drawn].mean(axis=1), [2.5, 97.5])
    return Change(name, float(pairs[0].mean()), float(pairs[1].mean()), float(low), float(high), pairs.shape[1])


def training_changes(steps: Sequence[Line]) -> list[Change]:
    """Return the changes of the training reward and of each function's score, from the first to the last windows."""
    windows = [line for line, previous in zip(steps, [None, *steps], strict=False) if is_new(line, previous)]
    scores = dict.fromkeys(name for line in windows for name in line if is_score(name) and name.startswith("rewards/"))
    metrics = {"reward": "reward", **({name: function_name(name) for name in scores} if len(scores) > 1 else {})}
    values = {label: [line[name] for line in windows if is_number(line.get(name))] for name, label in metrics.items()}
    return [change_of_ends(f"training {label}", found) for label, found in values.items() if found]


def change_of_ends(name: str, values: Sequence[float]) -> Change:
    """Return the change from the first to the last values, with the percentile bootstrap interval of the difference."""
    before, after = both_ends(values)
    generator = np.random.default_rng(0)
    means = [generator.choice(end, size=(BOOTSTRAP_RESAMPLES, len(end))).mean(axis=1) for end in (before, after)]
    low, high = np.percentile(means[1] - means[0], [2.5, 97.5])
    num = len(before) if len(values) > 1 else 0
    return Change(name, float(np.mean(before)), float(np.mean(after)), float(low), float(high), num)


def is_new(line: Line, previous: Line | None) -> bool:
    """Return whether a step has new groups. Later iterations of a window repeat its groups."""
    names = ("reward", "reward_std", WITHOUT_VARIANCE)
    return previous is None or any(line.get(name) != previous.get(name) for name in names)


def both_ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return a tenth of the values at each end, or more to have `FEWEST`, at most half. A single value is both ends."""
    size = max(1, round(SHARE * len(values)), min(FEWEST, len(values) // 2))
    return values[:size], values[-size:]


class CollapseWatch:
    """Finds the step at which groups have lost their spread while the reward is far below the best of the first groups.

    A run that is right nearly everywhere has no spread either, and is not collapsed.
    """

    def __init__(self, num_steps: int) -> None:
        self.first: list[Line] = []
        self.last: deque[Line] = deque(maxlen=max(LAST_STEPS, round(LAST_SHARE * num_steps)))
        self.since: int | None = None
        """The first step since which the run is collapsed."""

    def add(self, line: Line) -> bool:
        """Add the line of an optimizer step. Return whether a collapse begins."""
        if len(self.first) < FIRST_STEPS:
            self.first.append(line)
            return False
        self.last.append(line)
        if len(self.last) < LAST_STEPS or not self.is_collapsed():
            self.since = None
            return False
        begins = self.since is None
        self.since = line["step"] if begins else self.since
        return begins

    def is_collapsed(self) -> bool:
        """Return whether the last steps are collapsed."""
        reward, best = (mean_of(self.first, name) for name in ("reward", BEST_OF_GROUP))
        now = mean_of(self.last, "reward")
        is_far = now - reward < MOST_REALIZED * (best - reward)
        is_missing = best - now > LEAST_MISSING * mean_of(self.first, "reward_std")
        return self.has_lost_spread() and is_far and is_missing

    def has_lost_spread(self) -> bool:
        """Return whether most groups have no variance, and their answers have become few."""
        constant, constant_now = mean_of(self.first, WITHOUT_VARIANCE), mean_of(self.last, WITHOUT_VARIANCE)
        answers, answers_now = mean_of(self.first, DISTINCT_ANSWERS), mean_of(self.last, DISTINCT_ANSWERS)
        if answers_now < SAME_SPREAD * answers:
            is_lost = answers_now - 1 < LEAST_SPREAD * (answers - 1)
        else:
            is_lost = constant_now - constant > LEAST_GROWTH
        return constant_now > MOST_CONSTANT and is_lost

    def changes(self) -> list[Change]:
        """Return how the spread of groups changed from the first steps to the last."""
        changes = [Change(label, mean_of(self.first, name), mean_of(self.last, name)) for name, label in SPREAD.items()]
        return [change for change in changes if not math.isnan(change.before + change.after)]
