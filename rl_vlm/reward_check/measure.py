"""Calls of reward functions on the completions of rows: scores, faults and times."""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Sequence
from contextlib import chdir
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rewards.adapters import GOLD_COLUMNS
from rewards.calling import OFFERED, parameters
from rewards.contract import Score
from rewards.text import completion_text
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.reward.made_up import made_up_group, state_outside
from rl_vlm.reward_check.cheats import CHEATS, Texts, completions, gold_of

if TYPE_CHECKING:
    from rl_vlm.types import Sample

REPEATED = 20
"""Rows whose completions are scored again: a second time, and with the columns of another row."""


@dataclass(frozen=True)
class Row:
    """One row with its made-up completions."""

    index: int
    sample: Sample
    texts: dict[str, str]
    """Completions by name."""
    other: Sample | None
    """A row with another gold answer, if there is one."""


@dataclass
class Measured:
    """What one function gave to the completions of all rows that it applies to."""

    name: str
    weight: float
    reads_gold: bool
    """Whether it needs a column of gold answers, or gives other scores with the columns of another row."""
    num_rows: int
    empty_columns: list[str] = field(default_factory=list)
    """Columns that the function needs, or that it names and the data has, and that no row has a value in."""
    rows: list[Row] = field(default_factory=list)
    scores: list[dict[str, Score]] = field(default_factory=list)
    """By row, the scores of completions by name. None: the function does not apply to a completion."""
    seconds: list[float] = field(default_factory=list)
    """Of each call, divided by its completions."""
    num_unequal: int = 0
    """Rows of the first `REPEATED` that a second call scored otherwise."""

    def best_golds(self) -> list[float | None]:
        """Return the best score of each row's gold answer in any form; None if it has no number."""
        golds = ([score for name, score in row.items() if name not in CHEATS] for row in self.scores)
        return [max((score for score in row if isinstance(score, float)), default=None) for row in golds]

    def numbers(self) -> list[float]:
        """Return all scores that are numbers."""
        return [score for row in self.scores for score in row.values() if isinstance(score, float)]


def make_rows(indices: Sequence[int], samples: Sequence[Sample], named: Collection[str]) -> list[Row]:
    """Make up the completions of rows for a function that names these columns.

    A row's other answer is that of the next row whose gold answer differs.
    """
    golds = [gold_of(sample.columns, named) for sample in samples]
    rows = []
    for place, (index, sample) in enumerate(zip(indices, samples, strict=True)):
        later = (*range(place + 1, len(golds)), *range(place))
        other = next((i for i in later if golds[i] not in (None, golds[place])), None)
        wrong = "no such answer" if other is None else golds[other]
        texts = Texts(golds[place] or "7", wrong or "", question_of(sample))
        rows.append(Row(index, sample, completions(texts), None if other is None else samples[other]))
    return rows


def question_of(sample: Sample) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return completion_text([message for message in sample.prompt if message["role"] == "user"][-1:] or sample.prompt)


def measure(reward: Reward, indices: Sequence[int], samples: Sequence[Sample], columns: Sequence[str]) -> Measured:
    """Call a function once for the completions of each row, as training calls it."""
    taken = {*OFFERED, *reward.settings}
    named = {name: p for name, p in parameters(reward.function).items() if name not in taken}
    rows = make_rows(indices, samples, named)
    found = Measured(reward.name, reward.weight, needs_gold(reward), len(rows))
    expected = [name for name, p in named.items() if name in columns or p.default is p.empty]
    found.empty_columns = sorted(name for name in expected if all(s.columns.get(name) is None for s in samples))
    with random_states_kept(), chdir("."):
        for row in rows:
            if not reward.applies(row.sample.columns):
                continue
            started = time.perf_counter()
            scores = scored(reward, row.sample, row, columns)
            found.seconds.append((time.perf_counter() - started) / len(scores))
            found.rows.append(row)
            found.scores.append(dict(zip(row.texts, scores, strict=True)))
            if len(found.rows) <= REPEATED:
                is_equal = scored(reward, row.sample, row, columns) == scores
                found.num_unequal += not is_equal
                found.reads_gold |= is_equal and follows_columns(reward, row, scores, columns)
    return found


def needs_gold(reward: Reward) -> bool:
    """Return whether a function, not the adapter around it, cannot be called without a column of gold answers."""
    known = parameters(inspect.unwrap(reward.function))
    return any(p.default is p.empty for name, p in known.items() if name in GOLD_COLUMNS)


def follows_columns(reward: Reward, row: Row, scores: Sequence[Score], columns: Sequence[str]) -> bool:
    """Return whether the completions of a row get other scores with the columns of another row."""
    if row.other is None:
        return False
    with_other = replace(row.sample, columns=row.other.columns)
    return reward.applies(with_other.columns) and scored(reward, with_other, row, columns) != scores


def scored(reward: Reward, sample: Sample, row: Row, columns: Sequence[str]) -> list[Score]:
    """Return the scores of a row's completions as those of a sample."""
    group = made_up_group(sample, list(row.texts.values()))
    return reward.start([group], state_outside(), reward.form, columns)().scores
