"""The verdict on a training run: one word, and the figures that led to it.

    rewards faulty    functions failed on `MOST_FAULTED` of the completions or more
    rewards constant  no group ever had two different rewards
    too short         there are not enough steps, or not enough values
    collapsed         groups have lost their spread, far below the best completions of the first groups
    learned, worse    the interval of the change lies above 0, or below
    unchanged         it contains 0

The first that holds is the verdict. The change is the held-out reward's, row by row, from the first evaluation to the
model that the run ends with. Without two evaluations, it is the training reward's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from rl_vlm.evaluation.figures import bootstrap_interval
from rl_vlm.evaluation.paired import Pairs, paired_change
from rl_vlm.log.changes import Change
from rl_vlm.log.metrics import (
    BEST_OF_GROUP,
    DISTINCT_ANSWERS,
    FAULTED,
    ITERATION,
    NUM_GROUPS,
    WITHOUT_VARIANCE,
    function_name,
    is_number,
    is_score,
)

Line = Mapping[str, Any]

MOST_FAULTED = 0.05
"""Completions without a score are left out of training. From this share on, they are a fault to correct."""
FEWEST_STEPS = 10
"""With fewer steps, a change tells nothing about the settings. One in twenty intervals lies above or below 0 by
chance."""
SHARE = 0.1
"""Share of a run's steps with new groups at each of the two ends that are compared. Their mean reward is one value."""
ENOUGH = 16
"""An end has at least this many values, if there are enough for both."""

FIRST_GROUPS, FIRST_STEPS = 32, 1
"""Groups, and steps with new groups, that show which answers the starting model can find."""
LAST_GROUPS, LAST_STEPS = 128, 4
"""Groups, and steps with new groups, over which a collapse is judged. Single steps vary."""
MOST_CONSTANT = 0.6
"""More than this share of groups without variance is a loss of spread, if answers are lost as well."""
LEAST_SPREAD = 0.2
"""Answers are lost if the distinct ones of a group beyond the first have fallen below this share of the start."""
ALL_DISTINCT, LEAST_GROWTH = 0.9, 0.2
"""If more than this share of a group's answers are distinct at both ends, they are texts without a form. The share of
groups without variance must then have grown by so much: prompts that are too easy or too hard have none at first."""
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
NO_SCORE = "share of completions with a reward fault"


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
class Verdict:
    """The outcome of a run, with its figures."""

    outcome: Outcome
    step: int | None
    """The first of the steps that showed a collapse."""
    is_evaluated: bool
    """Whether held-out rows were evaluated. Otherwise training data alone are judged."""
    changes: list[Change]
    """The figures of the verdict. The first decides between learned, unchanged and worse."""
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
    """Held-out values by name, of `reward` and each reward function: means per row at the first evaluation, and of the
    same rows with the final model. Empty unless the completions of two evaluations are logged."""
    num_evaluations: int = 0
    num_generations: int | None = None
    """Completions of a group, if they are known."""
    lacks: Sequence[str] = ()


def judge(evidence: Evidence) -> Verdict:
    """Judge a run."""
    steps = training_steps(evidence.lines)
    held_out = [paired_change(name, *pairs) for name, pairs in evidence.held_out.items()]
    rewards = [*held_out, *training_changes(steps)]
    search = CollapseSearch(evidence.num_generations)
    for line in steps:
        search.add(line)
    faulted = [line for line in evidence.lines if line.get(FAULTED)]
    num_steps = len(training_lines(evidence.lines))
    outcome = (
        Outcome.FAULTY if mean_of(evidence.lines, FAULTED) >= MOST_FAULTED
        else Outcome.CONSTANT if is_constant(steps)
        else Outcome.SHORT if num_steps < FEWEST_STEPS
        else Outcome.COLLAPSED if search.since is not None
        else word_of(rewards[0] if rewards else None)
    )  # fmt: skip
    return Verdict(
        outcome,
        search.since if outcome == Outcome.COLLAPSED else None,
        evidence.num_evaluations > 0,
        [*rewards, *search.changes(), *([fault_change(evidence.lines)] if faulted else [])],
        list(evidence.lacks),
    )


def is_constant(steps: Sequence[Line]) -> bool:
    """Return whether no group of the run has two different rewards."""
    groups = sum(num_groups(line) for line in steps)
    return groups >= FIRST_GROUPS and all(line.get(WITHOUT_VARIANCE) == 1.0 for line in steps)


def word_of(change: Change | None) -> Outcome:
    """Return whether a run learned, by the interval of its change."""
    if change is None or change.has_few:
        return Outcome.SHORT
    if change.low is not None and change.low > 0:
        return Outcome.LEARNED
    return Outcome.WORSE if change.high is not None and change.high < 0 else Outcome.UNCHANGED


def training_lines(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of optimizer steps whose groups have a reward."""
    return [line for line in lines if line["step"] > 0 and is_number(line.get("reward"))]


def training_steps(lines: Iterable[Line]) -> list[Line]:
    """Return the lines with new groups. Later iterations of a window repeat the figures of its groups."""
    return [line for line in training_lines(lines) if not line.get(ITERATION)]


def num_groups(line: Line) -> int:
    """Return the groups of a step. If they are not known, as in old runs, return the fewest that suffice."""
    return int(line.get(NUM_GROUPS, FIRST_GROUPS))


def mean_of(lines: Iterable[Line], metric: str) -> float:
    """Return the mean of a metric over the lines that have it, or NaN if no line has it."""
    values = [line[metric] for line in lines if is_number(line.get(metric))]
    return float(np.mean(values)) if values else math.nan


def training_changes(steps: Sequence[Line]) -> list[Change]:
    """Return the changes of the training reward and of each function's score, from the first to the last steps."""
    scores = dict.fromkeys(name for line in steps for name in line if is_score(name) and name.startswith("rewards/"))
    metrics = {"reward": "reward", **({name: function_name(name) for name in scores} if len(scores) > 1 else {})}
    values = {label: [line[name] for line in steps if is_number(line.get(name))] for name, label in metrics.items()}
    return [replace(change_of_ends(name, found), split="training") for name, found in values.items() if found]


def change_of_ends(name: str, values: Sequence[float]) -> Change:
    """Return the change from the first to the last values, with the bootstrap interval of the difference."""
    before, after = both_ends(values)
    low, high = bootstrap_interval(after, before)
    num = len(before) if len(values) > 1 else 0
    return Change(name, float(np.mean(before)), float(np.mean(after)), low, high, num)


def both_ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last tenth of the values, or up to half to have `ENOUGH`. A single value is both
    ends."""
    size = max(1, round(SHARE * len(values)), min(ENOUGH, len(values) // 2))
    return values[:size], values[-size:]


def fault_change(lines: Sequence[Line]) -> Change:
    """Return the share of completions that functions failed on, in the first and the last window."""
    shares = [line[FAULTED] for line in lines if is_number(line.get(FAULTED))]
    return Change(NO_SCORE, shares[0], shares[-1])


class CollapseSearch:
    """Finds the step at which groups have lost their spread while the reward is far below the best of the first groups.

    A run that is right nearly everywhere has no spread either, and is not collapsed.
    """

    def __init__(self, num_generations: int | None = None) -> None:
        self.num_generations = num_generations
        self.first: list[Line] = []
        self.last: deque[Line] = deque()
        self.since: int | None = None
        """The first of the steps that showed the collapse, if the run is collapsed."""

    def add(self, line: Line) -> bool:
        """Add the line of a step with new groups. Return whether a collapse begins."""
        if not has_enough(self.first, FIRST_GROUPS, FIRST_STEPS):
            self.first.append(line)
            return False
        self.last.append(line)
        while has_enough(list(self.last)[1:], LAST_GROUPS, LAST_STEPS):
            self.last.popleft()
        was_collapsed = self.since is not None
        if not has_enough(self.last, LAST_GROUPS, LAST_STEPS) or not self.is_collapsed():
            self.since = None
        elif not was_collapsed:
            self.since = self.last[0]["step"]
        return self.since is not None and not was_collapsed

    def is_collapsed(self) -> bool:
        """Return whether the last steps are collapsed. Steps of another directory leave out the starting model."""
        if self.first[0]["step"] > 1:
            return False
        reward, best = (mean_of(self.first, name) for name in ("reward", BEST_OF_GROUP))
        now = mean_of(self.last, "reward")
        is_far = now - reward < MOST_REALIZED * (best - reward)
        is_missing = best - now > LEAST_MISSING * mean_of(self.first, "reward_std")
        return self.has_lost_spread() and is_far and is_missing

    def has_lost_spread(self) -> bool:
        """Return whether most groups have no variance, and their answers have become few."""
        constant, constant_now = mean_of(self.first, WITHOUT_VARIANCE), mean_of(self.last, WITHOUT_VARIANCE)
        answers, answers_now = mean_of(self.first, DISTINCT_ANSWERS), mean_of(self.last, DISTINCT_ANSWERS)
        if self.num_generations and min(answers, answers_now) > ALL_DISTINCT * self.num_generations:
            is_lost = constant_now - constant > LEAST_GROWTH
        else:
            is_lost = answers_now - 1 < LEAST_SPREAD * (answers - 1)
        return constant_now > MOST_CONSTANT and is_lost

    def changes(self) -> list[Change]:
        """Return how the spread of groups changed from the first steps to the last."""
        changes = [Change(label, mean_of(self.first, name), mean_of(self.last, name)) for name, label in SPREAD.items()]
        return [change for change in changes if not math.isnan(change.before + change.after)]


def has_enough(lines: Sequence[Line], groups: int, steps: int) -> bool:
    """Return whether lines have so many groups and steps."""
    return len(lines) >= steps and sum(map(num_groups, lines)) >= groups
