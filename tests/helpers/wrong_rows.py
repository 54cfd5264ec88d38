"""Shared rows of one prompt with one thing wrong each, which a comparison with dense rows must show."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import torch

from rl_vlm.model import policy as policy_module
from rl_vlm.model.layout import ForwardInputs, shared_inputs
from rl_vlm.model.policy import Policy
from rl_vlm.types import Forward, Observation, ScoredGroup
from tests.helpers.builders import whole


def see_each_other(rows: ForwardInputs) -> ForwardInputs:
    """The same row and positions under the model's mask for one long completion."""
    return replace(rows, layout=None)


def positions_go_on(rows: ForwardInputs) -> ForwardInputs:
    """Every completion starts where the row before it ends."""
    positions, layout = rows.kwargs["position_ids"].clone(), rows.layout
    assert layout is not None
    prefix = layout.prefix_index.numel()
    positions[..., prefix:] = positions[..., :prefix].max() + 1 + torch.arange(positions.shape[-1] - prefix)
    return replace(rows, kwargs=rows.kwargs | {"position_ids": positions})


def another_image(rows: ForwardInputs) -> ForwardInputs:
    """An image of the same size, hence the same tokens.

    Its values are normal, not another noise image's: that moves the log-probs of Gemma 4 by less than 0.01.
    """
    (prompt,) = rows.rendered
    pixels = torch.randn(prompt.mm_inputs["pixel_values"].shape, generator=torch.Generator().manual_seed(0))
    return replace(rows, rendered=[replace(prompt, mm_inputs=prompt.mm_inputs | {"pixel_values": pixels})])


def another_observed_image(rows: ForwardInputs) -> ForwardInputs:
    """An image of the same size in the observation that is first in the row, wherever it is."""
    seen = next(each for each in rows.rendered if isinstance(each, Observation) and each.mm_inputs)
    pixels = torch.randn(seen.mm_inputs["pixel_values"].shape, generator=torch.Generator().manual_seed(0))
    other = replace(seen, mm_inputs=seen.mm_inputs | {"pixel_values": pixels})
    return replace(rows, rendered=[other if each is seen else each for each in rows.rendered])


WRONG_ROWS = [see_each_other, positions_go_on, another_image]
WRONG_TURNS = [see_each_other, positions_go_on, another_observed_image]


def effect(policy: Policy, groups: Sequence[ScoredGroup], change: Callable[[ForwardInputs], ForwardInputs]) -> float:
    """By how much a change of the shared row moves a log-prob."""
    batch = whole(groups, shared=True)
    expected = policy(Forward(batch)).logprobs_NT
    with mock.patch.object(policy_module, "shared_inputs", lambda *args: change(shared_inputs(*args))):
        return (policy(Forward(batch)).logprobs_NT - expected).abs().max().item()
