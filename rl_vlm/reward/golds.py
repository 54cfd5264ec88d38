"""Gold answers under their own reward: the score of completions that are made up from a row's columns."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import chdir
from typing import TYPE_CHECKING, Any, NamedTuple

from rewards.contract import Fault, Score
from rewards.forms import gold_forms
from rl_vlm.reward.function import Reward, random_states_kept

if TYPE_CHECKING:
    from rl_vlm.types import Group, Sample


class GoldScore(NamedTuple):
    """The best score of a gold answer, or why it has none. Both are None if the function does not apply."""

    score: float | None
    fault: str | None = None


def why_not_scored(reward: Reward) -> str | None:
    """Return why a function is not called on gold answers, or None."""
    if reward.worker or inspect.iscoroutinefunction(reward.function) or reward.asks_a_model:
        return "it is async, has a timeout or asks a model, so that a call for every row may cost much"
    if "model_image_sizes" in inspect.signature(reward.function).parameters:
        return "it reads coordinates in the images of the model, and gold answers may have others"
    return None


def reads_images(reward: Reward) -> bool:
    """Return whether a function reads the images of a row, or their sizes."""
    return bool({"images", "image_sizes"} & inspect.signature(reward.function).parameters.keys())


def gold_completions(golds: Sequence[Any]) -> list[str]:
    """Return completions that give a gold answer: alone, in `<answer>` tags, and in tags after a thought."""
    texts = [gold if isinstance(gold, str) else json.dumps(gold, default=str) for gold in golds if gold is not None]
    return [completion for text in texts or [""] for completion in gold_forms(text).values()]


def gold_scores(reward: Reward, samples: Sequence[Sample], columns: Sequence[str]) -> list[GoldScore]:
    """Return the best score that a function gives to a gold answer of each row. `columns` are those of gold answers.

    Global random states stay as they are.
    """
    from rl_vlm.types import TrainerState

    groups = [gold_group(sample, columns) for sample in samples]
    names = {name for sample in samples for name in sample.columns}
    with random_states_kept(), chdir("."):
        answer = reward.start(groups, TrainerState(global_step=0, max_steps=1, epoch=0.0), reward.form, names)()
    scores = iter(answer.scores)
    return [best([next(scores) for _ in group.completions]) for group in groups]


def gold_group(sample: Sample, columns: Sequence[str]) -> Group:
    """Return the completions that give a row's gold answers, as a group."""
    import torch

    from rl_vlm.types import Completion, Group, Prompt

    texts = gold_completions([sample.columns.get(name) for name in columns])
    completions = [Completion(torch.arange(len(text)), torch.zeros(len(text)), "stop", text) for text in texts]
    return Group(sample.sample_id, Prompt(sample, torch.empty(0, dtype=torch.int64), {}, {}), completions, 0)


def best(scores: Sequence[Score]) -> GoldScore:
    """Return the largest number among scores, else the first fault."""
    numbers = [score for score in scores if isinstance(score, float)]
    faults = [score for score in scores if isinstance(score, Fault)]
    return GoldScore(max(numbers)) if numbers else GoldScore(None, faults[0].message if faults else None)
