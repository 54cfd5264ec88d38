"""Call reward functions on made-up completions of rows, and record scores, faults and times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import TYPE_CHECKING, NamedTuple

from rewards.calling import OFFERED, parameters
from rewards.contract import Score
from rewards.text import completion_text
from rl_vlm.config.schema import DataConfig, RewardsConfig
from rl_vlm.data.check import bad_row
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.errors import DataError
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.reward.golds import (
    NO_ANSWER,
    PROBED,
    Reading,
    columns_to_write,
    find_reading,
    gold_completions,
    gold_scores,
    gold_texts,
    golds_of,
    needs_gold,
    others_of,
    score_texts,
    spread_over,
    why_not_called,
    why_not_comparable,
)  # fmt: skip
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import Checking, Note
from rl_vlm.tools.checks.rewards.cheats import Texts, cheat_completions
from rl_vlm.tools.checks.settings import first_turns

if TYPE_CHECKING:
    from rl_vlm.data.prompts import PromptBuilder
    from rl_vlm.types import Sample

REPEATED = 20
"""Number of rows that are scored again: once unchanged, and once with the columns of another row."""


class TriedRow(NamedTuple):
    """One row with its made-up completions and their scores, both by name."""

    index: int
    best_gold: float | None
    """The best score of the gold answer in any form, or None if no form has a number."""
    texts: dict[str, str]
    """The gold answer in the forms that the function reads, or in all forms, and cheats."""
    scores: dict[str, Score]
    """None: the function does not apply to the completion."""


@dataclass
class Trial:
    """Scores and times of one function on all rows that it applies to."""

    name: str
    weight: float
    reads_gold: bool
    """Whether the function needs a column of gold answers, or scores change with the columns of another row."""
    num_rows: int
    not_compared: str | None = None
    """The reason why gold answers and cheats are not compared, if there is one."""
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


def try_functions(
    data_config: DataConfig,
    rewards: RewardsConfig,
    num_rows: int,
    builder: PromptBuilder | None = None,
    has_tools: bool = False,
) -> Checking[list[Trial]]:
    """Score made-up completions of up to `num_rows` training rows, evenly spread, with each reward function.

    `builder` is the run's prompt builder, which chooses the frames of videos. Without it, frames have even distances.
    Yield a finding for each row that cannot be read, and a note for each function that is left out.

    Raises DataError if no row can be read, and RewardError if a function cannot be loaded or lacks a column.
    """
    data = load_rows(data_config, "train").with_frames_of(builder and builder.video_processor)
    with RewardSuite(rewards, environments=()) as suite:
        suite.check_columns(data.columns)
        indices, samples = yield from read_samples(data, num_rows, builder)
        suite.use_forms(suite.find_forms(lambda applies: next((s for s in samples if applies(s.columns)), samples[0])))
        if has_tools:
            yield from first_turns(suite.functions)
        found = []
        for reward in suite.functions:
            if reason := why_left_out(reward, data.columns):
                yield Note(f"{reward.name}: {reason}", is_checked=False)
                continue
            trial = try_function(reward, indices, samples, data.columns)
            if trial.not_compared:
                yield Note(f"gold answers and cheats of {trial.name}: {trial.not_compared}", is_checked=False)
            found.append(trial)
        return found


def why_left_out(reward: Reward, columns: Sequence[str]) -> str | None:
    """Return the reason why a function is not called on made-up completions, or None if it is called."""
    if reward.asks_a_model:
        return "it asks a model for each completion"
    return why_not_called(reward, columns)


def read_samples(
    data: Rows, num_rows: int, builder: PromptBuilder | None = None
) -> Checking[tuple[list[int], list[Sample]]]:
    """Read up to `num_rows` rows, evenly spread over the data. Yield a finding for each row that cannot be read.

    Videos are not decoded: functions get their times, but not their pixels.
    """
    spread = spread_over(range(len(data)), num_rows)
    found: list[tuple[int, Sample]] = []
    problems: list[str] = []
    for index in spread:
        try:
            sample = data.sample(index, decode_videos=False)
            found.append((index, builder.shown(sample) if builder else sample))
        except DataError as error:
            problems.append(str(error))
            yield replace(bad_row(data, index, error), rows=(index,))
    if not found:
        raise DataError(f"{data.name}: none of the {len(spread)} rows can be read. {problems[0]}")
    return [index for index, _ in found], [sample for _, sample in found]


def try_function(reward: Reward, indices: Sequence[int], samples: Sequence[Sample], columns: Sequence[str]) -> Trial:
    """Call a function once for the completions of each row, as training calls it.

    The wrong answer of a row is the gold answer of the next row with a different one.
    """
    known = parameters(reward.function)
    not_compared = why_not_comparable(reward)
    found = Trial(reward.name, reward.weight, needs_gold(reward, columns), len(samples), not_compared)
    empty = {name for name in reward.columns.difference(OFFERED) if all(s.columns.get(name) is None for s in samples)}
    found.empty_columns = sorted(name for name in empty if name in columns or known[name].default is Parameter.empty)
    with random_states_kept(), chdir("."):
        golds = columns_to_write(reward, columns)
        reading = find_reading(reward, spread_over(samples, PROBED), golds, columns)
        best = gold_scores(reward, samples, golds, reading, columns)
        answers = [reading.answer(gold_texts(sample.columns, golds)) for sample in samples]
        others = others_of(answers)  # ignores a column such as `options`
        for index, sample, other, (best_gold, _) in zip(indices, samples, others, best, strict=True):
            if not reward.applies(sample.columns):
                continue
            texts = made_up_texts(sample, golds, reading, None if other is None else answers[other])
            started = time.perf_counter()
            scores = score_texts(reward, sample, list(texts.values()), columns)
            found.seconds.append((time.perf_counter() - started) / len(scores))
            found.rows.append(TriedRow(index, best_gold, texts, dict(zip(texts, scores, strict=True))))
            if len(found.rows) <= REPEATED:
                score_again(reward, sample, None if other is None else samples[other], columns, found)
    return found


def made_up_texts(sample: Sample, columns: Sequence[str], reading: Reading, wrong: str | None) -> dict[str, str]:
    """Make up the completions of a row by name: the gold answers, which are in `columns`, and cheats."""
    gold = golds_of(sample, columns)
    texts = Texts(reading.answer(gold) or "", wrong or NO_ANSWER, question_of(sample), reading)
    chosen = reading.chosen(gold_completions(gold))
    return {f"{column} {form}": text for (column, form), text in chosen.items()} | cheat_completions(texts)


def question_of(sample: Sample) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return completion_text([message for message in sample.prompt if message["role"] == "user"][-1:] or sample.prompt)


def score_again(reward: Reward, sample: Sample, other: Sample | None, columns: Sequence[str], found: Trial) -> None:
    """Score the last row again, unchanged. If the scores are equal, score it with the columns of another row, too."""
    texts, scores = list(found.rows[-1].texts.values()), list(found.rows[-1].scores.values())
    is_equal = score_texts(reward, sample, texts, columns) == scores
    found.num_unequal += not is_equal
    if is_equal and other is not None and reward.applies(other.columns):
        changed = score_texts(reward, replace(sample, columns=other.columns), texts, columns)
        found.reads_gold |= changed != scores
