"""Groups that a token budget cuts into micro-batches, with a trained vision tower apart from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_vlm.model.loading import usable_sharing
from rl_vlm.model.policy import Policy
from rl_vlm.passes.micro_batches import make_micro_batches
from rl_vlm.passes.schedule import make_schedule
from rl_vlm.types import MicroBatch, ScoredGroup
from tests.helpers.builders import take_gradients
from tests.helpers.given_groups import make_budget


def cut(policy: Policy, groups: Sequence[ScoredGroup]) -> list[MicroBatch]:
    """Micro-batches of at most 14 tokens more than the longest prompt has."""
    longest = max(len(group.group.prompt.token_ids) for group in groups)
    return make_micro_batches(
        groups,
        longest + 14,
        usable_sharing(policy.transformer, "shared"),
        make_budget(policy).price,
        mixes_prompts=not policy.family.cross_attends,
    )


def cut_gradients(policy: Policy, groups: Sequence[ScoredGroup], batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Gradients of the sum that `family_parity.scores` takes, added up over micro-batches as in training."""
    lengths = [len(completion.token_ids) for group in groups for completion in group.group.completions]
    weights = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    owners = [(id(group), member) for group in groups for member in range(len(group.group.completions))]
    by_completion = dict(zip(owners, weights.split(lengths), strict=True))
    for work in make_schedule(batches, policy.vision, groups[0]):
        rows = policy(work.forward).logprobs_NT
        found = [by_completion[id(scored), member][span] for scored, member, span in work.forward.batch.members]
        torch.stack([(row[: len(w)] * w.to(row)).sum() for row, w in zip(rows, found, strict=True)]).sum().backward()
        for tower_backward in work.tower_backwards:
            policy(tower_backward).backward()
    assert not policy.vision.kept
    return take_gradients(policy)
