"""Calls of reward functions on the completions of rows: scores, faults and times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rewards.calling import OFFERED, parameters, takes_anything
from rewards.contract import Score
from rewards.text import completion_text
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.reward_check.cheats import CHEATS, Texts, completions, gold_of

if TYPE_CHECKING:
    from rl_vlm.types import Group, Sample

REPEATED = 20
"""Rows whose completions are scored a second time."""


@dataclass(frozen=True)
class Row:
    """One row with its made-up completions."""

    index: int
    sample: Sample
    texts: dict[str, str]
    """Completions by name."""


@dataclass
class Measured:
    """What one function gave to the completions of all rows that it applies to."""

    name: str
    weight: float
    reads_gold: bool
    """Whether it names a column of the data, or takes all of them."""
    num_rows: int
    empty_columns: list[str] = field(default_factory=list)
    """Columns that the function names and that no row has a value in."""
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


def make_rows(indices: Sequence[int], samples: Sequence[Sample]) -> list[Row]:
    """Make up the completions of rows. A row's other answer is that of the next row whose gold answer differs."""
    golds = [gold_of(sample.columns) for sample in samples]
    rows = []
    for place, (index, sample) in enumerate(zip(indices, samples, strict=True)):
        later = (*golds[place + 1 :], *golds[:place])
        other = next((gold for gold in later if gold not in (None, golds[place])), None)
        texts = Texts(golds[place] or "7", other or "no such answer", question_of(sample))
        rows.append(Row(index, sample, completions(texts)))
    return rows


def question_of(sample: Sample) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return completion_text([message for message in sample.prompt if message["role"] == "user"][-1:] or sample.prompt)


def measure(reward: Reward, rows: Sequence[Row], columns: Sequence[str]) -> Measured:
    """Call a function once for the completions of each row, as training calls it."""
    named = parameters(reward.function).keys() - set(OFFERED) - reward.settings.keys()
    found = Measured(reward.name, reward.weight, bool(named) or takes_anything(reward.function), len(rows))
    found.empty_columns = sorted(name for name in named if all(r.sample.columns.get(name) is None for r in rows))
    with random_states_kept(), chdir("."):
        for row in rows:
            if not reward.applies(row.sample.columns):
                continue
            group = made_up_group(row)
            started = time.perf_counter()
            scores = scored(reward, group, columns)
            found.seconds.append((time.perf_counter() - started) / len(scores))
            found.rows.append(row)
            found.scores.append(dict(zip(row.texts, scores, strict=True)))
            if len(found.rows) <= REPEATED:
                found.num_unequal += scored(reward, group, columns) != scores
    return found


def scored(reward: Reward, group: Group, columns: Sequence[str]) -> list[Score]:
    """Return the scores of a group's completions. Messages of faults are left out, so that scores can be compared."""
    from rl_vlm.types import TrainerState

    answer = reward.start([group], TrainerState(global_step=0, max_steps=1, epoch=0.0), reward.form, columns)()
    return answer.scores


def made_up_group(row: Row) -> Group:
    """Return the group of a row's completions. Its images count as if the processor did not resize them."""
    import torch

    from rl_vlm.types import Completion, Group, Prompt

    image_sizes = [image.size for image in row.sample.images]
    prompt = Prompt(row.sample, torch.empty(0, dtype=torch.int64), {}, {}, image_sizes)
    sizes = {text: len(text.split()) for text in row.texts.values()}  # as if each word were a token
    made_up = [Completion(torch.arange(sizes[t]), torch.zeros(sizes[t]), "stop", t) for t in row.texts.values()]
    return Group(f"row {row.index}", prompt, made_up, 0)
