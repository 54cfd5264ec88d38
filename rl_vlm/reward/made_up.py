"""Made-up groups of completions, for calls of reward functions outside of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rewards.adapters import gold_of
from rewards.forms import THOUGHT, tagged

if TYPE_CHECKING:
    from rl_vlm.types import Group, Sample, TrainerState

MADE_UP_ANSWER = "7"
"""The gold answer for a row without one."""


def made_up_group(sample: Sample, texts: Sequence[str]) -> Group:
    """Turn texts into completions of a row. Each word counts as a token, and images as not resized."""
    import torch  # not at the top: a dry run imports this module without torch

    from rl_vlm.types import Completion, Group, Prompt

    image_sizes = [image.size for image in sample.images]
    prompt = Prompt(sample, torch.empty(0, dtype=torch.int64), {}, {}, image_sizes)
    lengths = [len(text.split()) for text in texts]
    completions = [
        Completion(torch.arange(length), torch.zeros(length), "stop", text)
        for length, text in zip(lengths, texts, strict=True)
    ]
    return Group(sample.sample_id, prompt, completions, 0)


def made_up_completion(columns: Mapping[str, Any]) -> str:
    """Build a completion that gives the row's gold answer, for a call that tests whether a function can read it."""
    gold = gold_of(columns)
    return THOUGHT + tagged(MADE_UP_ANSWER if gold is None else str(gold))


def state_outside() -> TrainerState:
    """Build the state of a trainer before its first step."""
    from rl_vlm.types import TrainerState

    return TrainerState(global_step=0, max_steps=1, epoch=0.0)
