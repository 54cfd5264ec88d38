"""Call reward functions on made-up completions of rows, and record scores, faults and times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rewards.calling import OFFERED, parameters
from rewards.contract import Score
from rewards.text import completion_text
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.reward.golds import (
    MADE_UP,
    NO_ANSWER,
    PROBED,
    Reading,
    columns_to_write,
    find_reading,
    gold_completions,
    gold_texts,
    needs_gold,
    others_of,
    score_texts,
    spread_over,
)  # fmt: skip
from rl_vlm.tools.checks.rewards.cheats import Texts, cheat_completions

if TYPE_CHECKING:
    from rl_vlm.types import Sample

REPEATED = 20
"""Number of rows that are scored again: once unchanged, and once with the columns of another row."""


@dataclass
class TriedRow:
    """One row with its made-up completions and their scores."""

    index: int
    sample: Sample
    golds: dict[str, str]
    """Completions with the gold answer, by name: the forms that the function reads, or all forms."""
    all_golds: dict[str, str]
    cheats: dict[str, str]
    other: Sample | None
    """A row with another gold answer, if there is one."""
    scores: dict[str, Score] = field(default_factory=dict)
    """Scores of completions by name. None: the function does not apply to the completion."""

    @property
    def texts(self) -> dict[str, str]:
        return self.golds | self.cheats

    @property
    def best_gold(self) -> float | None:
        """Return the best score of the gold answer in any form, or None if no form has a number."""
        found = (self.scores.get(name) for name in self.all_golds)
        return max((score for score in found if isinstance(score, float)), default=None)


@dataclass
class Measured:
    """Scores and times of one function on all rows that it applies to."""

    name: str
    weight: float
    reads_gold: bool
    """Whether the function needs a column of gold answers, or scores change with the columns of another row."""
    num_rows: int
    empty_columns: list[str] = field(default_factory=list)
    """Columns that the function names but no row fills. An optional one counts only if the data has it."""
    rows: list[TriedRow] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Seconds per completion of each call."""
    num_unequal: int = 0
    """How many of the first `REPEATED` rows got other scores in a second call."""

    def numbers(self) -> list[float]:
        """Return all scores that are numbers."""
        return [score for row in self.rows for score in row.scores.values() if isinstance(score, float)]


def measure(reward: Reward, indices: Sequence[int], samples: Sequence[Sample], columns: Sequence[str]) -> Measured:
    """Call a function once for the completions of each row, as training calls it."""
    taken = {*OFFERED, *reward.settings}
    named = {name: p for name, p in parameters(reward.function).items() if name not in taken}
    found = Measured(reward.name, reward.weight, needs_gold(reward, columns), len(samples))
    expected = [name for name, p in named.items() if name in columns or p.default is p.empty]
    found.empty_columns = sorted(name for name in expected if all(s.columns.get(name) is None for s in samples))
    with random_states_kept(), chdir("."):
        golds = columns_to_write(reward, columns)
        reading = find_reading(reward, spread_over(samples, PROBED), golds, columns)
        for row in make_rows(indices, samples, golds, reading):
            if reward.applies(row.sample.columns):
                measure_row(reward, row, columns, found)
        if not reading.is_inverted:
            score_low_golds(reward, found.rows, columns)
    return found


def make_rows(
    indices: Sequence[int], samples: Sequence[Sample], columns: Sequence[str], reading: Reading
) -> Iterator[TriedRow]:
    """Make up the completions of rows. `columns` hold the gold answers.

    As a wrong answer of a row, take the gold answer of the next row that has a different one.
    """
    golds = [gold_texts(sample.columns, columns) for sample in samples]
    others = others_of([reading.answer(gold) for gold in golds])  # ignores a column such as `options`
    for index, sample, gold, other in zip(indices, samples, golds, others, strict=True):
        wrong = None if other is None else reading.answer(golds[other])
        gold = gold or MADE_UP
        texts = Texts(reading.answer(gold) or "", wrong or NO_ANSWER, question_of(sample), reading)
        completions = gold_completions(gold)
        yield TriedRow(
            index, sample, reading.chosen(completions), completions, cheat_completions(texts),
            None if other is None else samples[other],
        )  # fmt: skip


def question_of(sample: Sample) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return completion_text([message for message in sample.prompt if message["role"] == "user"][-1:] or sample.prompt)


def measure_row(reward: Reward, row: TriedRow, columns: Sequence[str], found: Measured) -> None:
    """Score the completions of a row. Score the first `REPEATED` rows again."""
    started = time.perf_counter()
    scores = scored(reward, row.sample, row, columns)
    found.seconds.append((time.perf_counter() - started) / len(scores))
    row.scores = dict(zip(row.texts, scores, strict=True))
    found.rows.append(row)
    if len(found.rows) <= REPEATED:
        is_equal = scored(reward, row.sample, row, columns) == scores
        found.num_unequal += not is_equal
        found.reads_gold |= is_equal and follows_columns(reward, row, scores, columns)


def score_low_golds(reward: Reward, rows: Sequence[TriedRow], columns: Sequence[str]) -> None:
    """Score gold answers below the maximum in the other forms too, since a function may read several forms."""
    highest = max((row.best_gold for row in rows if row.best_gold is not None), default=0.0)
    for row in rows:
        left = {name: text for name, text in row.all_golds.items() if name not in row.golds}
        if left and (row.best_gold is None or row.best_gold < highest):
            row.golds = row.golds | left
            row.scores |= zip(left, score_texts(reward, row.sample, list(left.values()), columns), strict=True)


def follows_columns(reward: Reward, row: TriedRow, scores: Sequence[Score], columns: Sequence[str]) -> bool:
    """Return whether the scores of a row change with the columns of another row."""
    if row.other is None:
        return False
    with_other = replace(row.sample, columns=row.other.columns)
    return reward.applies(with_other.columns) and scored(reward, with_other, row, columns) != scores


def scored(reward: Reward, sample: Sample, row: TriedRow, columns: Sequence[str]) -> list[Score]:
    """Score the completions of `row` as completions of `sample`."""
    return score_texts(reward, sample, list(row.texts.values()), columns)
