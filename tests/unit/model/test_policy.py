from math import exp, log, tanh
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from rl_vlm.model import policy as policy_module
from rl_vlm.model.families import FAMILIES
from rl_vlm.model.policy import Policy

BANNED = [2, 4]


class HeadOnly(nn.Module):
    """A model whose logits are its hidden states."""

    text_config = SimpleNamespace(final_logit_softcapping=None)
    config = SimpleNamespace(
        image_token_id=BANNED[0], video_token_id=BANNED[1], get_text_config=lambda: HeadOnly.text_config
    )
    device = torch.device("cpu")

    def __init__(self, vocabulary):
        super().__init__()
        self.head = nn.Linear(vocabulary, vocabulary, bias=False)
        nn.init.eye_(self.head.weight)

    def get_output_embeddings(self):
        return self.head


def make_policy(vocabulary=5, temperature=1.0, dtype=torch.float32):
    return Policy(HeadOnly(vocabulary), FAMILIES["qwen2_vl"], temperature, dtype)


def test_banned_tokens_have_no_share_in_the_distribution():
    logits = torch.tensor([[log(1.0), log(3.0), 50.0, log(4.0), -50.0]])  # 1/8, 3/8, banned, 4/8, banned
    logprobs, entropies = make_policy().logprobs(logits, torch.tensor([1]))
    assert logprobs.tolist() == pytest.approx([log(3 / 8)])
    assert entropies.tolist() == pytest.approx([-(log(1 / 8) + 3 * log(3 / 8) + 4 * log(4 / 8)) / 8])


def test_the_ban_takes_the_banned_mass_off_the_softmax():
    logits = torch.randn(6, 5)
    targets = torch.tensor([0, 1, 3, 3, 1, 0])
    logprobs, _ = make_policy().logprobs(logits, targets)
    plain = logits.log_softmax(-1)
    banned_mass = plain.exp()[:, BANNED].sum(-1)
    torch.testing.assert_close(logprobs, plain.gather(1, targets[:, None])[:, 0] - torch.log1p(-banned_mass))


def test_temperature_divides_the_logits():
    logits = torch.tensor([[2 * log(1.0), 2 * log(3.0), 0.0, 2 * log(4.0), 0.0]])
    logprobs, _ = make_policy(temperature=2.0).logprobs(logits, torch.tensor([3]))
    assert logprobs.tolist() == pytest.approx([log(4 / 8)])


def test_a_soft_cap_bounds_the_logits_of_each_chunk_before_the_temperature(monkeypatch):
    monkeypatch.setattr(HeadOnly, "text_config", SimpleNamespace(final_logit_softcapping=2.0))
    monkeypatch.setattr(policy_module, "HEAD_CHUNK_ELEMENTS", 5)  # one token at once
    logits = torch.tensor([[0.0, 1.0, 9.0, -8.0, 3.0], [5.0, 0.0, 0.0, -1.0, 0.0]])
    first, second = ([exp(2 * tanh(x / 2) / 0.5) for x in row] for row in ([0.0, 1.0, -8.0], [5.0, 0.0, -1.0]))
    logprobs, _ = make_policy(temperature=0.5).logprobs(logits, torch.tensor([1, 0]))
    assert logprobs.tolist() == pytest.approx([log(first[1] / sum(first)), log(second[0] / sum(second))])


def test_scores_are_fp32_under_bf16():
    policy = make_policy(dtype=torch.bfloat16)
    logits = torch.randn(3, 5)
    logprobs, entropies = policy.logprobs(logits, torch.tensor([0, 1, 3]))
    assert logprobs.dtype == entropies.dtype == torch.float32
    rounded, _ = make_policy().logprobs(logits.bfloat16().float(), torch.tensor([0, 1, 3]))
    torch.testing.assert_close(logprobs, rounded)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7, 100])
def test_the_head_in_chunks_is_the_head(monkeypatch, rows_per_chunk):
    policy = make_policy(vocabulary=11, temperature=0.7)
    head = cast(HeadOnly, policy.model).head
    targets = torch.tensor([0, 1, 3, 5, 6, 7, 10])

    def scores_and_gradients():
        hidden = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
        logprobs, entropies = policy.logprobs(hidden, targets)
        loss = (logprobs * torch.arange(7)).sum()
        return [logprobs, entropies, *torch.autograd.grad(loss, (hidden, head.weight))]

    expected = scores_and_gradients()
    shapes = []
    watch_head(monkeypatch, lambda hidden: shapes.append(len(hidden)))
    monkeypatch.setattr(policy_module, "HEAD_CHUNK_ELEMENTS", rows_per_chunk * 11)
    for ours, other in zip(scores_and_gradients(), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6)
    assert max(shapes) == min(rows_per_chunk, 7)


def watch_head(monkeypatch, watcher):
    """Call `watcher` with the hidden states of every chunk."""
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        policy_module.F, "linear", lambda hidden, *weights: (watcher(hidden), linear(hidden, *weights))[1]
    )


def test_the_heads_weights_are_cast_once(monkeypatch):
    policy = make_policy(vocabulary=11, dtype=torch.bfloat16)
    weights = []
    monkeypatch.setattr(policy_module, "HEAD_CHUNK_ELEMENTS", 11)  # one token at once
    linear = torch.nn.functional.linear
    monkeypatch.setattr(policy_module.F, "linear", lambda hidden, w: (weights.append(w), linear(hidden, w))[1])
    logprobs, _ = policy.logprobs(torch.randn(3, 11, requires_grad=True), torch.tensor([0, 1, 3]))
    logprobs.sum().backward()
    assert len(weights) == 6  # each chunk again in the backward pass
    assert {(w.data_ptr(), w.dtype) for w in weights} == {(weights[0].data_ptr(), torch.bfloat16)}


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_of_many_chunks_are_not_added_in_bfloat16(monkeypatch, trained):
    torch.manual_seed(0)
    hidden = torch.randn(1024, 11).bfloat16().float()
    targets, weighting = torch.randint(5, 11, (1024,)), torch.randn(1024)

    def gradients(dtype, elements) -> list[Any]:
        policy = make_policy(vocabulary=11, dtype=dtype)
        policy.model.head.requires_grad_(trained)
        monkeypatch.setattr(policy_module, "HEAD_CHUNK_ELEMENTS", elements)
        states = hidden.clone().requires_grad_()
        (policy.logprobs(states, targets)[0] * weighting).sum().backward()
        return [states.grad, policy.model.head.weight.grad]

    exact = gradients(torch.float32, 2**26)
    in_chunks, at_once = gradients(torch.bfloat16, 11), gradients(torch.bfloat16, 2**26)
    assert (in_chunks[1] is not None) == trained
    for chunks, whole, reference in zip(in_chunks, at_once, exact, strict=True):
        if chunks is not None:
            assert (chunks - reference).norm() <= 1.5 * (whole - reference).norm() <= 0.02 * reference.norm()


def test_the_backward_pass_takes_back_no_random_numbers(monkeypatch):
    """A reward function of the next window can draw some at the same time, in another thread."""
    policy = make_policy()
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    logprobs, _ = policy.logprobs(
        torch.randn(3, 5, generator=torch.Generator()).requires_grad_(), torch.tensor([0, 1, 3])
    )
    drawn = []
    watch_head(monkeypatch, lambda _: drawn.append(torch.rand(1)))  # in backward
    logprobs.sum().backward()
    assert [*drawn, torch.rand(1)] == list(expected)
