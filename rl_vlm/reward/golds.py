"""Gold answers: finds their columns and the form that a function reads, and scores them with their own reward.

columns ─ gold_columns ─► gold_completions: each gold answer in every form ─ find_reading ─► Reading ─► gold_scores
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from rewards.adapters import GOLD_COLUMNS, ROW_COLUMNS, constants_of, gold_value
from rewards.calling import OF_MEDIA, is_async, parameters, takes_anything
from rewards.contract import Fault, Score
from rewards.forms import bare_answer, gold_forms, is_box, json_of, written
from rewards.grounding.boxes import DEEPEST_LIST, REGION_KEYS
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.reward.made_up import MADE_UP_ANSWER, made_up_group, state_outside

if TYPE_CHECKING:
    from rl_vlm.types import Group, Sample

Box = tuple[float, float, float, float]
"""(x1, y1, x2, y2)."""
ColumnForm = tuple[str, str]
"""A column of gold answers, and the form in which a completion gives them."""
PROBED = 20
"""Number of evenly spread rows for finding the form in which a function reads answers."""
LEAST_EFFECT = 1e-6
"""Differences of scores up to this count as none."""
NO_ANSWER = "no such answer"


class GoldScore(NamedTuple):
    """The best score of a gold answer, or the fault. Both are None if the function does not apply."""

    score: float | None
    fault: str | None = None


def why_not_called(reward: Reward, columns: Iterable[str] = ()) -> str | None:
    """Return the reason why a function cannot score made-up completions, or None if it can."""
    reads = reward.reads_turns(columns)
    return "it reads turns or environments, which made-up completions do not have" if reads else None


def why_not_comparable(reward: Reward) -> str | None:
    """Return the reason why gold answers as completions say nothing about a function, or None.

    Images of made-up completions are not resized, so the pixels of the model's images are those of the data's.
    """
    if reward.settings.get("solution_times") == "frames":
        return "its gold answers are numbers of frames, and answers have seconds"
    units = [reward.settings.get(name) for name in ("coordinates", "solution_coordinates")]
    answer, gold = ("original" if unit == "absolute" else unit for unit in units)
    if None not in units and answer != gold:
        return f"its gold answers have coordinates that are {gold}, and answers {answer}"
    return None


def why_not_scored(reward: Reward, columns: Iterable[str] = ()) -> str | None:
    """Return the reason why a function is not called on the gold answers of all rows, or None if it is called."""
    if reason := why_not_called(reward, columns) or why_not_comparable(reward):
        return reason
    if reward.worker or is_async(reward.function) or reward.asks_a_model:
        return "it is async, has a timeout or asks a model, so that a call for every row may cost much"
    if {"model_image_sizes", "image_grid_thw"} & arguments_read(reward):
        return "it reads coordinates in the images of the model, and gold answers may have others"
    return None


def reads_media(reward: Reward) -> bool:
    """Return whether a function reads the images or videos of a row, their sizes or their times."""
    return not OF_MEDIA.isdisjoint(arguments_read(reward))


def arguments_read(reward: Reward) -> set[Any]:
    """Return the arguments that a function names. With `**kwargs`, add all constants in its code."""
    named: set[Any] = set(inspect.signature(reward.function).parameters)
    function = inspect.unwrap(reward.function)
    of_class = getattr(type(function).__call__, "__code__", None)
    code = getattr(function, "__code__", of_class) if takes_anything(reward.function) else None
    return named.union(constants_of(code))


def gold_columns(columns: Sequence[str], functions: Sequence[Reward]) -> list[str]:
    """Return the columns that functions name, except columns that distinguish kinds of rows."""
    named = {name for reward in functions for name in reward.columns}
    kinds = {"id", *ROW_COLUMNS, *(column for reward in functions for column in reward.applies_to)}
    return [name for name in columns if name in named - kinds]


def usual_columns(columns: Sequence[str]) -> list[str]:
    """Return the columns with a usual name for gold answers."""
    return [name for name in GOLD_COLUMNS if name in columns]


def answer_columns(columns: Sequence[str], functions: Sequence[Reward]) -> list[str]:
    """Return the gold columns that functions name, plus the columns that usually hold gold answers."""
    return list(dict.fromkeys([*gold_columns(columns, functions), *usual_columns(columns)]))


def gold_given(columns: Iterable[str], row: Mapping[str, Any], text: str) -> str | None:
    """Return the column whose gold answer a text gives, in any form, or None."""
    answer = bare_answer(text)
    golds = gold_texts(row, columns).items()
    return next((name for name, gold in golds if answer and answer in (gold.strip(), bare_answer(gold))), None)


def needs_gold(reward: Reward, columns: Sequence[str]) -> bool:
    """Return whether a function needs a column of gold answers. An adapter around it does not count."""
    known = parameters(inspect.unwrap(reward.function))
    golds = {*GOLD_COLUMNS, *gold_columns(columns, [reward])}
    return any(p.default is p.empty for name, p in known.items() if name in golds)


def columns_to_write(reward: Reward, columns: Sequence[str]) -> list[str]:
    """Return the gold columns that a function names, or `answer_columns` if it names none or takes any column."""
    named = gold_columns(columns, [reward])
    return named if named and not takes_anything(reward.function) else answer_columns(columns, [reward])


def gold_text(gold: Any) -> str | None:
    """Return a gold answer as text, or None if it is missing. Lists and objects are written as JSON."""
    gold = gold_value(gold)
    gold = gold.tolist() if hasattr(gold, "tolist") else gold  # NumPy arrays
    if gold is None or gold != gold:
        return None
    return gold if isinstance(gold, str) else json.dumps(gold, default=str)


def gold_texts(row: Mapping[str, Any], columns: Iterable[str]) -> dict[str, str]:
    """Return the gold answers of a row as text, by column."""
    return {name: text for name in columns if (text := gold_text(row.get(name))) is not None}


def golds_of(sample: Sample, columns: Iterable[str]) -> dict[str, str]:
    """Return the gold answers of a row as text, by column, or a made-up one if the row has none."""
    return gold_texts(sample.columns, columns) or {"": MADE_UP_ANSWER}


def gold_boxes(gold: Any) -> list[Box]:
    """Return all boxes in a gold answer, even if no image could have them."""
    text = gold_text(gold)
    return [] if text is None else list(boxes_in(json_of(bare_answer(text))))


def boxes_in(value: Any, depth: int = 0) -> Iterator[Box]:
    """Yield all lists of four numbers in nested lists, and in objects under the usual keys for boxes."""
    if is_box(value):
        x1, y1, x2, y2 = map(float, value)
        yield x1, y1, x2, y2
    elif depth <= DEEPEST_LIST:
        parts = value if isinstance(value, list) else []
        if isinstance(value, Mapping):
            parts = [value[key] for key in REGION_KEYS if key in value]
        for part in parts:
            yield from boxes_in(part, depth + 1)


def shortest_gold(row: Mapping[str, Any], columns: Iterable[str]) -> str:
    """Return the shortest bare answer among a row's gold answers, or "" if there is none."""
    return min(map(bare_answer, gold_texts(row, columns).values()), key=len, default="")


def gold_completions(golds: Mapping[str, str]) -> dict[ColumnForm, str]:
    """Build completions that give a row's gold answers, by column and form. Each text occurs once."""
    keys: dict[str, ColumnForm] = {}
    for column, gold in golds.items():
        for form, text in gold_forms(gold).items():
            keys.setdefault(text, (column, form))
    return {key: text for text, key in keys.items()}


@dataclass(frozen=True)
class Reading:
    """The gold answers that a function reads, and their form. It reads one if wrong answers get another score."""

    keys: frozenset[ColumnForm]
    """Keys in `gold_completions` of the completions that it reads. Empty if it reads none."""
    column: str
    form: str
    """The column and the form with the highest scores for gold answers."""
    is_inverted: bool = False
    """Whether wrong answers score higher than gold answers."""

    def chosen(self, completions: Mapping[ColumnForm, str]) -> dict[ColumnForm, str]:
        """Return the completions that the function reads, or all if it reads none."""
        return {key: text for key, text in completions.items() if key in self.keys} or dict(completions)

    def answer(self, golds: Mapping[str, str]) -> str | None:
        """Return the bare answer in a row's gold answer, or None if the row has none."""
        gold = golds.get(self.column, next(iter(golds.values()), None))
        return None if gold is None else bare_answer(gold)

    def write(self, answer: str, has_thought: bool = True) -> str:
        """Write an answer in the form that the function reads."""
        return written(answer, self.form, has_thought)


def find_reading(reward: Reward, samples: Sequence[Sample], columns: Sequence[str], data: Iterable[str]) -> Reading:
    """Find the form in which a function reads answers: score gold answers, and other rows' gold answers, in each form.

    `columns` are the columns of gold answers, `data` are all columns.
    """
    golds = [golds_of(sample, columns) for sample in samples]
    pairs: dict[ColumnForm, list[tuple[float, float]]] = {}
    for sample, gold, other in zip(samples, golds, others_of(golds), strict=True):
        if not reward.applies(sample.columns):
            continue
        mine = gold_completions(gold)
        wrong = gold_completions(dict.fromkeys(gold, NO_ANSWER) if other is None else golds[other])
        keys = [key for key in mine if key in wrong]
        scores = score_texts(reward, sample, [each[key] for each in (mine, wrong) for key in keys], data)
        for key, score, of_wrong in zip(keys, scores[: len(keys)], scores[len(keys) :], strict=True):
            if isinstance(score, float) and isinstance(of_wrong, float):
                pairs.setdefault(key, []).append((score, of_wrong))
    means = {key: fmean(score for score, _ in found) for key, found in pairs.items()}
    effects = {key: fmean(score - other for score, other in found) for key, found in pairs.items()}
    read = [key for key, effect in effects.items() if effect > LEAST_EFFECT]
    is_inverted = not read and any(effect < -LEAST_EFFECT for effect in effects.values())
    if is_inverted:
        read = [key for key, effect in effects.items() if effect < -LEAST_EFFECT]
    best = max(read or means, key=lambda key: (-1 if is_inverted else 1) * means[key], default=("", ""))
    return Reading(frozenset(read), *best, is_inverted)


def is_below(score: float, other: float) -> bool:
    """Return whether a score is less than another one by more than `LEAST_EFFECT`."""
    return score < other - LEAST_EFFECT


def others_of(golds: Sequence[Any]) -> list[int | None]:
    """Return for each gold answer the index of the next different one, in a circle, or None if all are equal."""
    places: list[int | None] = []
    for place, gold in enumerate(golds):
        later = (*range(place + 1, len(golds)), *range(place))
        places.append(next((i for i in later if golds[i] and golds[i] != gold), None))
    return places


def spread_over(rows: Sequence[Any], count: int) -> list[Any]:
    """Return up to `count` evenly spread rows."""
    return list(rows) if count >= len(rows) else [rows[i * len(rows) // count] for i in range(count)]


def gold_scores(
    reward: Reward, samples: Sequence[Sample], columns: Sequence[str], reading: Reading, data: Iterable[str]
) -> list[GoldScore]:
    """Return the best score that a function gives to each row's gold answers, which are in `columns`.

    First the forms that the function reads are scored. Rows below the highest score are scored again in all forms.
    """
    golds = [gold_completions(golds_of(sample, columns)) for sample in samples]
    found = best_scores(reward, samples, [reading.chosen(texts) for texts in golds], data)
    highest = max((each.score for each in found if each.score is not None), default=0.0)
    low = [i for i, each in enumerate(found) if each.score is None or is_below(each.score, highest) or highest <= 0]
    if low and reading.keys and not reading.is_inverted:
        again = best_scores(reward, [samples[i] for i in low], [golds[i] for i in low], data)
        for i, each in zip(low, again, strict=True):
            found[i] = found[i] if each.score is None else each
    return found


def best_scores(
    reward: Reward, samples: Sequence[Sample], texts: Sequence[Mapping[ColumnForm, str]], data: Iterable[str]
) -> list[GoldScore]:
    """Return the best score of each row's completions."""
    groups = [made_up_group(sample, list(mine.values())) for sample, mine in zip(samples, texts, strict=True)]
    with random_states_kept(), chdir("."):
        scores = iter(score_made_up(reward, groups, data))
    return [best([next(scores) for _ in group.completions]) for group in groups]


def score_texts(reward: Reward, sample: Sample, texts: Sequence[str], data: Iterable[str]) -> list[Score]:
    """Return the scores of texts as completions of a row. `data` are the columns of the data."""
    return score_made_up(reward, [made_up_group(sample, texts)], data)


def score_made_up(reward: Reward, groups: Sequence[Group], data: Iterable[str]) -> list[Score]:
    """Return the scores of made-up completions. `data` are the columns of the data.

    If a call raises, it is repeated in halves, so that only the completions that cause the exception get a fault.
    """
    scores = reward.start(groups, state_outside(), reward.form, data)().scores
    given = [score for score in scores if score is not None]
    fault = given[0] if len(given) > 1 else None
    if not isinstance(fault, Fault) or fault.kind != "exception" or any(score != fault for score in given):
        return scores
    return [score for half in halves(groups) for score in score_made_up(reward, half, data)]


def halves(groups: Sequence[Group]) -> list[list[Group]]:
    """Split the groups into two parts. A single group is split into two groups with half of its completions each."""
    if len(groups) > 1:
        middle = len(groups) // 2
        return [list(groups[:middle]), list(groups[middle:])]
    (group,) = groups
    middle = len(group.completions) // 2
    return [[replace(group, completions=part)] for part in (group.completions[:middle], group.completions[middle:])]


def gives_less_than_zero(reward: Reward, sample: Sample) -> bool:
    """Return whether a function scores an empty completion of a row below 0, as penalties do."""
    with random_states_kept(), chdir("."):
        (score,) = score_texts(reward, sample, [""], sample.columns)
    return isinstance(score, float) and score < 0


def best(scores: Sequence[Score]) -> GoldScore:
    """Return the largest score, or the first fault if no score is a number."""
    numbers = [score for score in scores if isinstance(score, float)]
    faults = [score for score in scores if isinstance(score, Fault)]
    return GoldScore(max(numbers)) if numbers else GoldScore(None, faults[0].message if faults else None)
