"""Whatever the groups, lengths, images and budget: micro-batches hold the batch, fit, and score as dense rows do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_vlm.model.policy import Policy
from rl_vlm.passes.micro_batches import Sharing, batch_tokens, make_micro_batches
from rl_vlm.types import Forward, MicroBatch, ScoredGroup
from tests.helpers.builders import (
    gradient_error,
    make_group,
    make_policy,
    make_prompt,
    noise_image,
    sharp_checkpoint,
    take_gradients,
)
from tests.helpers.given_groups import make_budget

SIZES = st.tuples(st.integers(8, 64), st.integers(8, 64))
GROUPS = st.lists(
    st.tuples(st.lists(SIZES, max_size=2), st.lists(st.integers(1, 12), min_size=1, max_size=5), st.booleans()),
    min_size=1,
    max_size=4,
)
"""Of each group: sizes of its images, lengths of its completions, whether its first completion is faulted."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("property"))


@pytest.fixture(scope="module", params=[False, True], ids=["trained", "frozen"])
def policy(checkpoint: Path, request: pytest.FixtureRequest) -> Policy:
    return make_policy(checkpoint, freeze_vision_tower=request.param)


def make_groups(checkpoint: Path, shapes: list[tuple[list[tuple[int, int]], list[int], bool]]) -> list[ScoredGroup]:
    groups = []
    for i, (sizes, lengths, faulted) in enumerate(shapes):
        images = [noise_image(*size, seed=10 * i + j) for j, size in enumerate(sizes)]
        group = make_group(make_prompt(checkpoint, images, text="no " * i), lengths, seed=i)
        group.valid_G[0] = not faulted
        groups.append(replace(group, group=replace(group.group, group_id=str(i))))
    return groups


def scores(policy: Policy, batches: list[MicroBatch]) -> tuple[dict[tuple[str, int], Tensor], dict[str, Tensor]]:
    """Log-probs by completion, and gradients of a sum that does not depend on how the batch is cut."""
    logprobs = {}
    for batch in batches:
        names = [(s.scored.group.group_id, member) for s in batch.subgroups for member in s.members]
        rows = policy(Forward(batch)).logprobs_NT
        signs = torch.tensor([(-1.0) ** (int(group) + member) for group, member in names])
        (signs @ rows.sum(dim=1)).backward()
        logprobs |= {
            name: row.detach()[: len(completion.token_ids)]
            for name, row, completion in zip(names, rows, batch.completions, strict=True)
        }
    return logprobs, take_gradients(policy)


@settings(max_examples=10, deadline=None)
@given(GROUPS, st.integers(1, 600), st.sampled_from(["auto", "shared", "dense"]))
def test_any_cut_holds_the_batch_fits_and_scores_as_dense_rows(
    checkpoint: Path, policy: Policy, shapes: list, budget: int, sharing: Sharing
) -> None:
    groups = make_groups(checkpoint, shapes)
    batches = make_micro_batches(groups, budget, sharing, make_budget(policy).price)

    members = [(s.scored.group.group_id, member) for batch in batches for s in batch.subgroups for member in s.members]
    valid = [(g.group.group_id, i) for g in groups for i, is_valid in enumerate(g.valid_G.tolist()) if is_valid]
    assert sorted(members) == valid

    for batch in batches:
        # The tower of a cut group runs apart from its micro-batches.
        assert batch_tokens(batch, make_budget(policy).price) <= budget or len(batch.completions) == 1

    if not valid:
        return
    (one_batch,) = make_micro_batches(groups, 10**9, "dense")
    logprobs, gradients = scores(policy, batches)
    expected, expected_gradients = scores(policy, [one_batch])
    assert logprobs.keys() == expected.keys()
    assert max((logprobs[name] - expected[name]).abs().max().item() for name in expected) <= 1e-5
    assert gradient_error(gradients, expected_gradients) <= 1e-5
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
