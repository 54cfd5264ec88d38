"""Gold answers under their own reward: which columns hold them, in which form a function reads them, and their scores.

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

from rewards.adapters import GOLD_COLUMNS, ROW_COLUMNS
from rewards.calling import is_async, parameters, takes_anything
from rewards.contract import Fault, Score
from rewards.forms import bare_answer, gold_forms, is_box, json_of, written
from rewards.grounding.boxes import DEEPEST_LIST, REGION_KEYS
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.reward.made_up import made_up_group, state_outside

if TYPE_CHECKING:
    from rl_vlm.types import Group, Sample

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2."""
PROBED = 20
"""Rows, evenly spread, on which it is found out in which form a function reads answers."""
LEAST_EFFECT = 1e-6
"""Difference of two scores that counts as none."""
NO_ANSWER = "no such answer"
MADE_UP = {"": "7"}
"""The gold answer of a row that has none."""


class GoldScore(NamedTuple):
    """The best score of a gold answer, or why it has none. Both are None if the function does not apply."""

    score: float | None
    fault: str | None = None


def why_not_scored(reward: Reward) -> str | None:
    """Return why a function is not called on gold answers, or None."""
    if reward.worker or is_async(reward.function) or reward.asks_a_model:
        return "it is async, has a timeout or asks a model, so that a call for every row may cost much"
    if "model_image_sizes" in inspect.signature(reward.function).parameters:
        return "it reads coordinates in the images of the model, and gold answers may have others"
    return None


def reads_images(reward: Reward) -> bool:
    """Return whether a function reads the images of a row, or their sizes."""
    return bool({"images", "image_sizes"} & inspect.signature(reward.function).parameters.keys())


def gold_columns(columns: Sequence[str], functions: Sequence[Reward]) -> list[str]:
    """Return the columns that functions name, without columns that tell kinds of rows apart."""
    named = {name for reward in functions for name in parameters(reward.function) if name not in reward.settings}
    kinds = {"id", *ROW_COLUMNS, *(column for reward in functions for column in reward.applies_to)}
    return [name for name in columns if name in named - kinds]


def answer_columns(columns: Sequence[str], functions: Sequence[Reward]) -> list[str]:
    """Return the columns that usually hold gold answers, and those that functions name."""
    return list(dict.fromkeys([*usual_columns(columns), *gold_columns(columns, functions)]))


def usual_columns(columns: Sequence[str]) -> list[str]:
    """Return the columns whose names are usual for gold answers."""
    return [name for name in GOLD_COLUMNS if name in columns]


def gold_given(columns: Iterable[str], row: Mapping[str, Any], text: str) -> str | None:
    """Return which of the columns has a gold answer that a text gives, in whatever form, or None."""
    answer = bare_answer(text)
    golds = gold_texts(row, columns).items()
    return next((name for name, gold in golds if answer and answer in (gold.strip(), bare_answer(gold))), None)


def needs_gold(reward: Reward, columns: Sequence[str]) -> bool:
    """Return whether a function, not the adapter around it, cannot be called without a column of gold answers."""
    known = parameters(inspect.unwrap(reward.function))
    golds = {*GOLD_COLUMNS, *gold_columns(columns, [reward])}
    return any(p.default is p.empty for name, p in known.items() if name in golds)


def columns_to_write(reward: Reward, columns: Sequence[str]) -> list[str]:
    """Return the gold columns that a function names.

    If it names none, or takes columns of any name, those that usually hold gold answers follow.
    """
    named = gold_columns(columns, [reward])
    takes_more = takes_anything(reward.function) or not named
    return list(dict.fromkeys([*named, *usual_columns(columns)])) if takes_more else named


def gold_text(gold: Any) -> str | None:
    """Return a gold answer as text, or None if it is missing. Lists and objects are written as JSON.

    Of an object with `ground_truth`, as verl's data has in `reward_model`, that counts.
    """
    gold = gold.get("ground_truth", gold) if isinstance(gold, Mapping) else gold
    gold = gold.tolist() if hasattr(gold, "tolist") else gold  # NumPy arrays
    if gold is None or gold != gold:
        return None
    return gold if isinstance(gold, str) else json.dumps(gold, default=str)


def gold_texts(row: Mapping[str, Any], columns: Iterable[str]) -> dict[str, str]:
    """Return the gold answers of a row as text, by column."""
    return {name: text for name in columns if (text := gold_text(row.get(name))) is not None}


def gold_boxes(gold: Any) -> list[Box]:
    """Return the boxes of a gold answer as they are written, also those that no image can have."""
    text = gold_text(gold)
    return [] if text is None else list(boxes_in(json_of(bare_answer(text))))


def boxes_in(value: Any, depth: int = 0) -> Iterator[Box]:
    """Yield the lists of four numbers in a list, and in an object under the usual keys of boxes."""
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
    """Return the shortest answer that a gold answer of a row gives; an empty one if there is none."""
    return min(map(bare_answer, gold_texts(row, columns).values()), key=len, default="")


def gold_completions(golds: Mapping[str, str]) -> dict[str, str]:
    """Return completions that give the gold answers of a row, by column and form. Each text occurs once."""
    names: dict[str, str] = {}
    for column, gold in golds.items():
        for form, text in gold_forms(gold).items():
            names.setdefault(text, f"{column} {form}")
    return {name: text for text, name in names.items()}


@dataclass(frozen=True)
class Reading:
    """Which gold answers a function reads, and in which form: those for which another answer gets another score."""

    names: frozenset[str]
    """Names of the completions of `gold_completions` that it reads. Empty if it reads none of them."""
    column: str
    form: str
    """The column and the form whose gold answers get the most."""
    is_inverted: bool = False
    """Whether other answers get more than gold answers in each of these."""

    def chosen(self, completions: Mapping[str, str]) -> dict[str, str]:
        """Return the completions of a row that the function reads, or all if it reads none."""
        return {name: text for name, text in completions.items() if name in self.names} or dict(completions)

    def answer(self, golds: Mapping[str, str]) -> str | None:
        """Return the answer that a row's gold answer gives, or None if the row has none."""
        gold = golds.get(self.column, next(iter(golds.values()), None))
        return None if gold is None else bare_answer(gold)

    def write(self, answer: str, has_thought: bool = True) -> str:
        """Return an answer in the form that the function reads."""
        return written(answer, self.form, has_thought)


def find_reading(reward: Reward, samples: Sequence[Sample], columns: Sequence[str], data: Iterable[str]) -> Reading:
    """Find out in which form a function reads answers: score gold answers and those of other rows in each form.

    `columns` are those of gold answers, `data` are all.
    """
    golds = [gold_texts(sample.columns, columns) or MADE_UP for sample in samples]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for sample, gold, other in zip(samples, golds, others_of(golds), strict=True):
        if not reward.applies(sample.columns):
            continue
        mine = gold_completions(gold)
        wrong = gold_completions(dict.fromkeys(gold, NO_ANSWER) if other is None else golds[other])
        names = [name for name in mine if name in wrong]
        scores = score_texts(reward, sample, [each[name] for each in (mine, wrong) for name in names], data)
        for name, score, of_wrong in zip(names, scores[: len(names)], scores[len(names) :], strict=True):
            if isinstance(score, float) and isinstance(of_wrong, float):
                pairs.setdefault(name, []).append((score, of_wrong))
    means = {name: fmean(score for score, _ in found) for name, found in pairs.items()}
    effects = {name: fmean(score - other for score, other in found) for name, found in pairs.items()}
    read = [name for name, effect in effects.items() if effect > LEAST_EFFECT]
    is_inverted = not read and any(effect < -LEAST_EFFECT for effect in effects.values())
    if is_inverted:
        read = [name for name, effect in effects.items() if effect < -LEAST_EFFECT]
    best = max(read or means, key=lambda name: (-1 if is_inverted else 1) * means[name], default="")
    column = next((name for name in columns if best.startswith(f"{name} ")), "")
    return Reading(frozenset(read), column, best.removeprefix(f"{column} "), is_inverted)


def others_of(golds: Sequence[Any]) -> list[int | None]:
    """Return for each gold answer the place of the next one, in a circle, that is another; None if all are equal."""
    places: list[int | None] = []
    for place, gold in enumerate(golds):
        later = (*range(place + 1, len(golds)), *range(place))
        places.append(next((i for i in later if golds[i] and golds[i] != gold), None))
    return places


def spread_over(rows: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` of the rows, evenly spread."""
    return list(rows) if count >= len(rows) else [rows[i * len(rows) // count] for i in range(count)]


def gold_scores(
    reward: Reward, samples: Sequence[Sample], columns: Sequence[str], reading: Reading, data: Iterable[str]
) -> list[GoldScore]:
    """Return the best score that a function gives to the gold answer of each row. `columns` are those of gold answers.

    Rows whose gold answers get less than others in the forms that the function reads are scored in all forms.
    """
    golds = [gold_completions(gold_texts(sample.columns, columns) or {"": ""}) for sample in samples]
    found = best_scores(reward, samples, [reading.chosen(texts) for texts in golds], data)
    highest = max((each.score for each in found if each.score is not None), default=0.0)
    low = [i for i, each in enumerate(found) if each.score is None or each.score < highest or highest <= 0]
    if low and reading.names and not reading.is_inverted:
        again = best_scores(reward, [samples[i] for i in low], [golds[i] for i in low], data)
        for i, each in zip(low, again, strict=True):
            found[i] = found[i] if each.score is None else each
    return found


def best_scores(
    reward: Reward, samples: Sequence[Sample], texts: Sequence[Mapping[str, str]], data: Iterable[str]
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

    A call that raises is repeated in halves, so that an exception is a fault of those completions alone that cause it.
    """
    scores = reward.start(groups, state_outside(), reward.form, data)().scores
    given = [score for score in scores if score is not None]
    fault = given[0] if len(given) > 1 else None
    if not isinstance(fault, Fault) or fault.kind != "exception" or any(score != fault for score in given):
        return scores
    return [score for half in halves(groups) for score in score_made_up(reward, half, data)]


def halves(groups: Sequence[Group]) -> list[list[Group]]:
    """Return the groups in two parts. One group is parted into two with half of its completions each."""
    if len(groups) > 1:
        middle = len(groups) // 2
        return [list(groups[:middle]), list(groups[middle:])]
    (group,) = groups
    middle = len(group.completions) // 2
    return [[replace(group, completions=part)] for part in (group.completions[:middle], group.completions[middle:])]


def gives_less_than_zero(reward: Reward, sample: Sample) -> bool:
    """Return whether a function gives an empty completion of a row less than 0, as penalties do."""
    with random_states_kept(), chdir("."):
        (score,) = score_texts(reward, sample, [""], sample.columns)
    return isinstance(score, float) and score < 0


def best(scores: Sequence[Score]) -> GoldScore:
    """Return the largest number among scores, else the first fault."""
    numbers = [score for score in scores if isinstance(score, float)]
    faults = [score for score in scores if isinstance(score, Fault)]
    return GoldScore(max(numbers)) if numbers else GoldScore(None, faults[0].message if faults else None)
