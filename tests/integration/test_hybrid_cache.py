"""Layers that carry a state: passes without gradients score completions behind copies of their prompt's cache."""

from pathlib import Path

import pytest
import torch

from rl_vlm.model.policy import Policy
from tests.helpers.builders import make_groups, make_policy, whole
from tests.helpers.family_parity import CASES, cases
from tests.tiny.build import TINY_FAMILIES
from tests.tiny.hybrid import HYBRID


@pytest.fixture(scope="module", params=sorted(HYBRID.keys() & TINY_FAMILIES.keys()))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return make_policy(checkpoint, gradient_checkpointing=True).eval()


@torch.no_grad()
def test_completions_behind_the_cache_score_as_dense_rows(family: str, checkpoint: Path, policy: Policy) -> None:
    for case in cases(family):
        groups = make_groups(checkpoint, CASES[case])
        dense, shared = policy(whole(groups, shared=False)), policy(whole(groups, shared=True))
        assert (shared.logprobs_NT - dense.logprobs_NT).abs().max() <= 1e-5
        assert (shared.entropies_NT - dense.entropies_NT).abs().max() <= 1e-5


@torch.no_grad()
def test_each_prompt_is_computed_once(family: str, checkpoint: Path, policy: Policy) -> None:
    groups = make_groups(checkpoint, CASES["several prompts"])
    policy.counters.clear()
    policy(whole(groups, shared=True))
    assert policy.counters["prefix_tokens"] == sum(len(group.group.prompt.token_ids) for group in groups)
    padded = [len(g.group.completions) * max(len(c.token_ids) for c in g.group.completions) for g in groups]
    assert policy.counters["computed_tokens"] == policy.counters["prefix_tokens"] + sum(padded)


@torch.no_grad()
def test_another_completions_state_would_show(
    family: str, checkpoint: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = whole(make_groups(checkpoint, CASES["one image"]), shared=True)
    expected = policy(batch).logprobs_NT
    forward = policy.transformer.base_model.forward

    def forward_twice(*args, **kwargs):
        if kwargs.get("past_key_values") is not None:
            forward(*args, **kwargs)  # leaves a completion's own state in the cache
        return forward(*args, **kwargs)

    monkeypatch.setattr(policy.transformer.base_model, "forward", forward_twice)
    assert (policy(batch).logprobs_NT - expected).abs().max() >= 0.01
