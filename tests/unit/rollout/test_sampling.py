import math
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rl_vlm.rollout.sampling import draw, next_tokens, stream_keys, token_distribution, truncate, uniforms
from rl_vlm.types import Sampling

NOTHING = torch.tensor([], dtype=torch.int64)

INF = float("inf")
# blake2b of "0/step-1/row-7/0" and "…/1", as little-endian int64.
KEYS = [-8320045850544526531, 458975653968898565]


def random_logprobs(rows: int = 64, vocabulary: int = 50, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(rows, vocabulary, generator=generator)).log_softmax(-1)


def kept_by(warper: Any, logprobs: torch.Tensor) -> torch.Tensor:
    return warper(None, logprobs)


def test_keys_are_stable_and_name_the_completion():
    assert stream_keys(0, "step-1/row-7", 2).tolist() == KEYS
    assert stream_keys(0, "step-1/row-7", 1).tolist() == KEYS[:1]
    others = [stream_keys(1, "step-1/row-7", 2), stream_keys(0, "step-1/row-8", 2)]
    assert not set(KEYS) & {key for keys in others for key in keys.tolist()}


def test_uniforms_are_splitmix64():
    # The first outputs of the published generator for seed 1234567.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    keys = torch.tensor([1234567])
    found = [uniforms(keys, torch.tensor([position])).item() for position in range(4)]
    assert found == [(x >> 11) / 2**53 for x in outputs]


def test_uniforms_do_not_depend_on_the_batch():
    keys = stream_keys(0, "g", 8)
    together = uniforms(keys, torch.full((8,), 5))
    alone = torch.cat([uniforms(keys[i : i + 1], torch.tensor([5])) for i in range(8)])
    assert torch.equal(together, alone)


def test_uniforms_are_uniform_and_independent():
    keys = stream_keys(3, "g", 200)
    # 100,000 values, positions x streams
    samples = torch.stack([uniforms(keys, torch.full((200,), at)) for at in range(500)])
    assert samples.min() >= 0 and samples.max() < 1
    counts = torch.histc(samples.float(), bins=20, min=0, max=1)
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 43.8  # 99.9 % quantile at 19 degrees of freedom
    for ours, neighbour in [(samples[1:], samples[:-1]), (samples[:, 1:], samples[:, :-1])]:
        correlation = torch.corrcoef(torch.stack([ours.flatten(), neighbour.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(100_000)


def test_distribution_is_taken_after_temperature_and_ban():
    logits = torch.tensor([[0.0, 2 * math.log(3), 9.0]], dtype=torch.bfloat16)
    logprobs = token_distribution(logits, temperature=2.0, banned=torch.tensor([2]))
    assert logprobs.dtype == torch.float32
    assert logprobs.exp()[0].tolist() == pytest.approx([0.25, 0.75, 0.0], abs=1e-3)
    assert logprobs[0, 2] == -INF
    assert logits[0, 2] == 9.0  # the model's logits are left alone


@pytest.mark.parametrize("top_k", [1, 7, 50, 400])
def test_top_k_keeps_the_tokens_of_transformers(top_k):
    logprobs = random_logprobs()
    expected = kept_by(TopKLogitsWarper(top_k), logprobs)
    assert torch.equal(truncate(logprobs, top_k, 1.0, None), expected)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
def test_top_p_keeps_the_tokens_of_transformers(top_p):
    logprobs = random_logprobs()
    assert torch.equal(truncate(logprobs, 0, top_p, None), kept_by(TopPLogitsWarper(top_p), logprobs))


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_keeps_the_tokens_of_transformers(min_p):
    logprobs = random_logprobs()
    assert torch.equal(truncate(logprobs, 0, 1.0, min_p), kept_by(MinPLogitsWarper(min_p), logprobs))


def test_truncations_are_chained_as_in_transformers():
    logprobs = random_logprobs(scale=1.0)
    expected = logprobs
    for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.7), MinPLogitsWarper(0.4)):
        expected = kept_by(warper, expected)
    assert torch.equal(truncate(logprobs, 20, 0.7, 0.4), expected)
    assert not torch.equal(truncate(logprobs, 0, 0.7, 0.4), expected)
    assert torch.equal(truncate(logprobs, 0, 1.0, None), logprobs)


def test_draw_inverts_the_cdf():
    logprobs = torch.tensor([0.5, 0.25, 0.25]).log().expand(5, 3)
    u = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76], dtype=torch.float64)
    assert draw(logprobs, u).tolist() == [0, 0, 1, 1, 2]


def test_draw_renormalises_what_truncation_left():
    logprobs = torch.tensor([-INF, math.log(0.1), -INF, math.log(0.3), -INF]).expand(3, 5)
    u = torch.tensor([0.0, 0.24, 0.26], dtype=torch.float64)
    assert draw(logprobs, u).tolist() == [1, 1, 3]


def test_draw_never_returns_an_impossible_token():
    largest = 1 - 2**-53
    logprobs = torch.full((40, 400), -INF)
    logprobs[:, 100:300] = random_logprobs(rows=40, vocabulary=200)
    for u in (0.0, 2**-53, 1 - 2**-24, largest, 1.0):  # 1.0 stands for rounding up in the product with the mass
        token_ids = draw(logprobs, torch.full((40,), u, dtype=torch.float64))
        assert logprobs.gather(1, token_ids[:, None]).isfinite().all()


def test_draw_follows_the_distribution():
    probs = torch.tensor([0.05, 0.15, 0.3, 0.5])
    first = torch.zeros(20_000, dtype=torch.int64)
    token_ids = draw(probs.log().expand(20_000, 4), uniforms(stream_keys(0, "g", 20_000), first))
    frequencies = token_ids.bincount(minlength=4) / 20_000
    assert frequencies.tolist() == pytest.approx(probs.tolist(), abs=0.015)


def sampling(temperature: float, top_k: int = 0) -> Sampling:
    return Sampling(num_generations=2, max_completion_length=1, temperature=temperature, seed=0, top_k=top_k)


def test_greedy_takes_the_best_allowed_token_and_scores_it_at_temperature_1():
    logits = torch.tensor([[0.0, math.log(3), 9.0]]).repeat(2, 1)
    token_ids, logprobs = next_tokens(
        logits, stream_keys(0, "g", 2), torch.tensor([0, 0]), sampling(0.0), banned=torch.tensor([2])
    )
    assert token_ids.tolist() == [1, 1]
    assert logprobs.exp().tolist() == pytest.approx([0.75, 0.75])


def test_generator_logprobs_are_those_before_truncation():
    logits = torch.tensor([[0.0, 2 * math.log(3)]]).repeat(2, 1)
    token_ids, logprobs = next_tokens(
        logits,
        stream_keys(0, "g", 2),
        torch.tensor([0, 0]),
        sampling(2.0, top_k=1),
        banned=torch.tensor([], dtype=torch.int64),
    )
    assert token_ids.tolist() == [1, 1]
    assert logprobs.exp().tolist() == pytest.approx([0.75, 0.75])


def test_each_rollout_adds_at_most_its_limit_of_tokens():
    limited = Sampling(num_generations=1, max_completion_length=8, temperature=1.0, seed=0, max_rollout_tokens=3)
    assert [limited.end(start) for start in (0, 3, 6)] == [3, 6, 8]
    assert [limited.reason_at(length) for length in (3, 6, 8)] == ["paused", "paused", "length"]
    assert sampling(1.0).end(0) == 1  # without a limit, at once
