"""How closely each family's shared and dense paths agree with each other and with the family's own forward.

    python -m tests.integration.family_parity        measures every family and writes the table of docs/families.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_vlm.policy import Policy
from rl_vlm.types import MicroBatch, ScoredGroup
from tests.integration.builders import gradient_error, take_gradients, whole


@dataclass(frozen=True)
class Scores:
    """Log-probs of every completion token, one behind the other, and gradients of a random weighting of them."""

    logprobs: Tensor
    gradients: dict[str, Tensor]


def weighted_sum(logprobs: Tensor) -> Tensor:
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (weights.to(logprobs) * logprobs).sum()


def scores(policy: Policy, groups: Sequence[ScoredGroup], shared: bool) -> Scores:
    """Of all groups in one micro-batch, through our code."""
    batch: MicroBatch = whole(groups, shared)
    rows = policy(batch).logprobs_NT
    logprobs = torch.cat([row[: len(c.token_ids)] for row, c in zip(rows, batch.completions, strict=True)])
    weighted_sum(logprobs).backward()
    return Scores(logprobs.detach(), take_gradients(policy))


def stock_scores(policy: Policy, groups: Sequence[ScoredGroup]) -> Scores:
    """Of the family's own forward on one unpadded row at a time, which chooses its positions and masks itself."""
    logprobs = torch.cat(
        [stock_row(policy, group, index) for group in groups for index in range(len(group.group.completions))]
    )
    weighted_sum(logprobs).backward()
    return Scores(logprobs.detach(), take_gradients(policy))


def stock_row(policy: Policy, group: ScoredGroup, index: int) -> Tensor:
    prompt, completion = group.group.prompt, group.group.completions[index]
    width = len(completion.token_ids)
    model: Any = policy.transformer
    values = policy.family.completion_inputs
    extra = {
        name: torch.cat([ids, torch.full((width,), values.get(name, 0))])[None]
        for name, ids in prompt.token_inputs.items()
    }
    token_ids = torch.cat([prompt.token_ids, completion.token_ids])[None]
    mm_inputs = {name: to_dtype(value, model.dtype) for name, value in prompt.mm_inputs.items()}
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None
    output = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **extra, **mm_inputs)
    scored = output.logits[0, -width - 1 : -1].log_softmax(-1)
    return scored.gather(-1, completion.token_ids[:, None])[:, 0]


def to_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


@dataclass(frozen=True)
class Parity:
    """Largest differences of log-probs, and of gradients by the measure of `gradient_error`."""

    logprobs: float
    gradients: float

    @staticmethod
    def of(ours: Scores, expected: Scores) -> Parity:
        difference = (ours.logprobs - expected.logprobs).abs().max().item()
        return Parity(difference, gradient_error(ours.gradients, expected.gradients))
