"""Log-probs and entropies of the LM head, against a log-softmax of all logits at once."""

from functools import partial
from math import exp, log, tanh
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rl_vlm.model import head as head_module
from rl_vlm.model.families import FAMILIES
from rl_vlm.model.head import Head, chunked_scores, head_function
from rl_vlm.model.policy import Policy

BANNED = [2, 4]
VOCABULARY = 11
TARGETS = [0, 1, 3, 5, 6, 7, 10]


class HeadOnly(nn.Module):
    """A model that is an LM head. Its logits are its hidden states, unless a test changes the weights."""

    text_config = SimpleNamespace(final_logit_softcapping=None, vocab_size=1000)
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


class Adapted(nn.Linear):
    """A head with an adapter, which has no bias."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size, bias=False)
        self.requires_grad_(False)
        self.adapter = nn.Linear(size, size)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.adapter(input.tanh())


def make_policy(vocabulary=5, temperature=1.0, dtype=torch.float32):
    return Policy(HeadOnly(vocabulary), FAMILIES["qwen2_vl"], temperature, dtype)


def log_softmax(logits: Tensor, temperature: float, bound: float | None) -> Tensor:
    """Compute log-probs of all tokens, as a paper would write them."""
    capped = logits if bound is None else bound * torch.tanh(logits / bound)
    return (capped / temperature).index_fill(-1, torch.tensor(BANNED), -torch.inf).log_softmax(-1)


HEADS = {
    "plain": lambda: nn.Linear(VOCABULARY, VOCABULARY, bias=False),
    "bias": lambda: nn.Linear(VOCABULARY, VOCABULARY),
    "frozen": lambda: nn.Linear(VOCABULARY, VOCABULARY).requires_grad_(False),
    "adapted": lambda: Adapted(VOCABULARY),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bound", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_values_and_gradients_are_those_of_a_log_softmax(monkeypatch, head, bound, temperature, rows_per_chunk):
    monkeypatch.setattr(HeadOnly, "text_config", SimpleNamespace(final_logit_softcapping=bound, vocab_size=1000))
    monkeypatch.setattr(head_module, "HEAD_CHUNK_ELEMENTS", rows_per_chunk * VOCABULARY)
    torch.manual_seed(0)
    policy = make_policy(VOCABULARY, temperature)
    module = HEADS[head]().double()
    policy.model.head = module
    hidden = torch.randn(7, VOCABULARY, dtype=torch.float64, requires_grad=True)
    targets, weighting = torch.tensor(TARGETS), torch.randn(7, dtype=torch.float64)
    trained = [hidden, *(p for p in module.parameters() if p.requires_grad)]
    assert len(trained) == {"plain": 2, "bias": 3, "frozen": 1, "adapted": 3}[head]

    logprobs, entropies = policy.logprobs(hidden, targets)
    gradients = torch.autograd.grad((logprobs * weighting).sum(), trained)
    expected = log_softmax(module(hidden), temperature, bound)
    chosen = expected.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, chosen)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).nan_to_num().sum(-1).detach())
    torch.testing.assert_close(gradients, torch.autograd.grad((chosen * weighting).sum(), trained))


def test_the_gradient_of_a_tied_weight_is_added_to_that_of_the_embeddings():
    torch.manual_seed(0)
    policy = make_policy(VOCABULARY)
    weight = policy.model.head.weight
    targets = torch.tensor(TARGETS)
    policy.logprobs(weight[targets] * 2, targets)[0].sum().backward()
    chosen = log_softmax((weight[targets] * 2) @ weight.T, 1.0, None).gather(-1, targets[:, None])
    torch.testing.assert_close(weight.grad, torch.autograd.grad(chosen.sum(), weight)[0])


def test_a_trained_head_needs_no_gradient_of_hidden_states():
    policy = make_policy(VOCABULARY)
    weight, targets = policy.model.head.weight, torch.tensor(TARGETS)
    hidden = torch.randn(7, VOCABULARY)
    policy.logprobs(hidden, targets)[0].sum().backward()
    chosen = log_softmax(hidden @ weight.T, 1.0, None).gather(-1, targets[:, None])
    torch.testing.assert_close(weight.grad, torch.autograd.grad(chosen.sum(), weight)[0])


def test_entropies_have_no_gradient_and_passes_without_gradients_keep_nothing():
    policy = make_policy()
    hidden = torch.randn(3, 5, requires_grad=True)
    logprobs, entropies = policy.logprobs(hidden, torch.tensor([0, 1, 3]))
    assert logprobs.requires_grad and not entropies.requires_grad
    with torch.no_grad():
        assert not policy.logprobs(hidden, torch.tensor([0, 1, 3]))[0].requires_grad


def test_small_entropies_beside_large_logits_are_exact():
    """A difference of the log-sum-exp and the expected logit would lose them."""
    logits = torch.tensor([[3000.0, 3000.0 - 5.0, 0.0, 0.0, 0.0]])
    _, entropies = make_policy().logprobs(logits, torch.tensor([0]))
    share = exp(-5.0) / (1 + exp(-5.0))
    assert entropies.item() == pytest.approx(-share * log(share) - (1 - share) * log(1 - share), rel=1e-4, abs=0)


@pytest.fixture
def no_kernels(monkeypatch):
    """Compile without Inductor, which takes seconds."""
    head_module.compiled.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    head_module.compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("no_kernels")
def test_fused_operations_are_the_same_and_compiled_once(dtype):
    torch.manual_seed(0)

    layer = HeadOnly(VOCABULARY).head
    product, weights = head_function(layer, None if dtype == torch.float32 else dtype)

    def scores_and_gradients(fused: bool, num_tokens: int) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(num_tokens, VOCABULARY, generator=generator).requires_grad_()
        targets = torch.tensor(TARGETS).repeat(3)[:num_tokens]
        head = Head(product, 0.7, torch.tensor([2]), fused)
        logprobs, entropies = chunked_scores(head, weights, hidden, targets, VOCABULARY)
        loss = (logprobs * torch.randn(num_tokens, generator=generator)).sum()
        return [logprobs, entropies, *torch.autograd.grad(loss, (hidden, layer.weight))]

    compiled = []
    for num_tokens in (7, 3, 19):
        torch.testing.assert_close(scores_and_gradients(True, num_tokens), scores_and_gradients(False, num_tokens))
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled == [2, 2, 2]  # the forward and the backward


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
    monkeypatch.setattr(HeadOnly, "text_config", SimpleNamespace(final_logit_softcapping=2.0, vocab_size=1000))
    monkeypatch.setattr(head_module, "HEAD_CHUNK_ELEMENTS", 5)  # one token at once
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
    monkeypatch.setattr(head_module, "HEAD_CHUNK_ELEMENTS", rows_per_chunk * 11)
    for ours, other in zip(scores_and_gradients(), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6)
    assert max(shapes) == min(rows_per_chunk, 7)


def watch_head(monkeypatch, watcher):
    """Call `watcher` with the hidden states of every chunk."""
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        head_module.F, "linear", lambda hidden, *weights: (watcher(hidden), linear(hidden, *weights))[1]
    )


def test_the_heads_weights_are_cast_once(monkeypatch):
    policy = make_policy(vocabulary=11, dtype=torch.bfloat16)
    weights = []
    monkeypatch.setattr(head_module, "HEAD_CHUNK_ELEMENTS", 11)  # one token at once
    linear = torch.nn.functional.linear
    monkeypatch.setattr(head_module.F, "linear", lambda hidden, w: (weights.append(w), linear(hidden, w))[1])
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
        monkeypatch.setattr(head_module, "HEAD_CHUNK_ELEMENTS", elements)
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
    torch.manual_seed(0)
    expected = torch.rand(3)
    drawn = []
    watch_head(monkeypatch, lambda _: drawn.append(torch.rand(1)))  # in forward and backward
    hidden = torch.randn(3, 5, generator=torch.Generator()).requires_grad_()
    policy = make_policy()
    torch.manual_seed(0)
    logprobs, _ = policy.logprobs(hidden, torch.tensor([0, 1, 3]))
    logprobs.sum().backward()
    assert [*drawn, torch.rand(1)] == list(expected)
