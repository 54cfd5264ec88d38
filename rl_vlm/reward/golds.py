"""Gold answers under their own reward: the score of completions that are made up from a row's columns."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import chdir
from typing import TYPE_CHECKING, Any, NamedTuple

from rewards.adapters import ROW_COLUMNS
from rewards.calling import is_async, parameters
from rewards.contract import Fault, Score
from rewards.forms import gold_forms
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.reward.made_up import made_up_group, state_outside

if TYPE_CHECKING:
    from rl_vlm.types import Sample


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
    """Return those of the columns that functions name, without those that tell kinds of rows apart."""
    named = {name for reward in functions for name in parameters(reward.function) if name not in reward.settings}
    kinds = {"id", *ROW_COLUMNS, *(column for reward in functions for column in reward.applies_to)}
    return [name for name in columns if name in named - kinds]


def gold_completions(golds: Sequence[Any]) -> list[str]:
    """Return completions that give a gold answer: alone, in `<answer>` tags, and in tags after a thought."""
    texts = [text for gold in golds if (text := gold_text(gold)) is not None]
    return [completion for text in texts or [""] for completion in gold_forms(text).values()]


def gold_scores(reward: Reward, samples: Sequence[Sample], columns: Sequence[str]) -> list[GoldScore]:
    """Return the best score that a function gives to a gold answer of each row. `columns` are those of gold answers.

    Global random states stay as they are.
    """
    groups = [
        made_up_group(sample, gold_completions([sample.columns.get(name) for name in columns])) for sample in samples
    ]
    names = {name for sample in samples for name in sample.columns}
    with random_states_kept(), chdir("."):
        answer = reward.start(groups, state_outside(), reward.form, names)()
    scores = iter(answer.scores)
    return [best([next(scores) for _ in group.completions]) for group in groups]


def gold_text(gold: Any) -> str | None:
    """Return a gold answer as text, or None if it is missing. Lists and objects are written as JSON.

    Of an object with `ground_truth`, as verl's data has in `reward_model`, that counts.
    """
    gold = gold.get("ground_truth", gold) if isinstance(gold, Mapping) else gold
    gold = gold.tolist() if hasattr(gold, "tolist") else gold  # NumPy arrays
    if gold is None or gold != gold:
        return None
    return gold if isinstance(gold, str) else json.dumps(gold, default=str)


def gives_less_than_zero(reward: Reward, sample: Sample) -> bool:
    """Return whether a function gives an empty completion of a row less than 0, as penalties do."""
    with random_states_kept(), chdir("."):
        group = made_up_group(sample, [""])
        (score,) = reward.start([group], state_outside(), reward.form, sample.columns)().scores
    return isinstance(score, float) and score < 0


def best(scores: Sequence[Score]) -> GoldScore:
    """Return the largest number among scores, else the first fault."""
    numbers = [score for score in scores if isinstance(score, float)]
    faults = [score for score in scores if isinstance(score, Fault)]
    return GoldScore(max(numbers)) if numbers else GoldScore(None, faults[0].message if faults else None)
