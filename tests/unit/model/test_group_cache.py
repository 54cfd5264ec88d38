"""One copy of a prompt's keys for its completions, against a softmax over all keys of each completion alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from rl_vlm.errors import ModelError
from rl_vlm.model import group_cache, softcap
from rl_vlm.model.group_cache import (
    GroupCacheLayer,
    GroupLayout,
    RowGroups,
    attention_with_lse,
    expanded_cache,
    group_layers,
    layer_class,
)

CPU = torch.device("cpu")
LENGTHS = [5, 3]
"""Tokens of two prompts; the second is padded on the left."""
SCALE = 0.6


class Decoding:
    """A layer that decodes completions of one or two prompts, and all keys and values of each completion."""

    def __init__(self, owners: list[int], window: int | None = None, dim: int = 8, value_dim: int = 8) -> None:
        layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
        prompts = max(owners) + 1
        keys, values = torch.randn(prompts, 2, max(LENGTHS), dim), torch.randn(prompts, 2, max(LENGTHS), value_dim)
        layer.update(keys, values)
        valid = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS[:prompts])[:, None]
        self.groups = RowGroups.of(owners, valid, CPU)
        self.layer: GroupCacheLayer = layer_class()(layer)
        self.window = window
        self.keys = [keys[o, :, max(LENGTHS) - LENGTHS[o] :] for o in owners]
        self.values = [values[o, :, max(LENGTHS) - LENGTHS[o] :] for o in owners]

    def step(self, num_new: int, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Append random tokens. Return the outputs of four query heads on two key heads, and those expected."""
        rows, dims = len(self.keys), (self.keys[0].shape[-1], self.values[0].shape[-1])
        query = torch.randn(rows, 4, num_new, dims[0])
        new = [torch.randn(rows, 2, num_new, dim) for dim in dims]
        num_keys = self.layer.get_seq_length() + num_new
        layout = GroupLayout(self.groups, [self.layer], num_new, num_keys)
        rule: Any = causal_mask_function if self.window is None else sliding_window_causal_mask_function(self.window)
        layout = layout.with_masks(rule)
        key, value = self.layer.update(new[0], new[1])
        ours = layout.attend(query, key, value, SCALE, softcap)
        self.keys = [torch.cat(pair, dim=1) for pair in zip(self.keys, new[0], strict=True)]
        self.values = [torch.cat(pair, dim=1) for pair in zip(self.values, new[1], strict=True)]
        return ours, torch.stack([self.alone(row, query[row], softcap) for row in range(rows)])

    def alone(self, row: int, query: Tensor, softcap: float | None) -> Tensor:
        """Attention of one completion's last tokens, (queries, heads, value_dim), from all scores."""
        key, value = (x[row].repeat_interleave(2, dim=0) for x in (self.keys, self.values))
        scores = query @ key.mT * SCALE
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(key.shape[1])[-query.shape[1] :, None] - torch.arange(key.shape[1])
        seen = (distance >= 0) & (distance < (self.window or 10**9))
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(0, 1)

    def keep(self, rows: list[int]) -> None:
        """Go on with some of the completions."""
        self.groups, prompts = self.groups.keep(torch.tensor(rows))
        self.layer.keep(torch.tensor(rows), prompts)
        self.keys, self.values = [self.keys[row] for row in rows], [self.values[row] for row in rows]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 6, 100])
@pytest.mark.parametrize("owners", [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1], [0], [0, 1, 1]])
def test_each_completion_attends_to_its_prompt_and_its_own_tokens(owners, window, softcap, monkeypatch):
    monkeypatch.setattr(group_cache, "ROOM", 2)  # buffers are made anew
    decoding = Decoding(owners, window)
    for num_new in (1, 1, 3, 1, 1, 2, 1):
        torch.testing.assert_close(*decoding.step(num_new, softcap))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kept", [[0, 2, 3, 4], [1, 4], [3, 4], [0]])
def test_completions_that_are_left_go_on(kept, window):
    decoding = Decoding([0, 0, 0, 1, 1], window)
    for rows in (None, kept, [0]):
        if rows is not None:
            decoding.keep(rows)
        for num_new in (2, 1, 1):
            torch.testing.assert_close(*decoding.step(num_new))
    assert len(decoding.layer.of_prompts[0]) == 1  # the prompt of finished completions is dropped


def test_keys_and_values_may_differ_in_size():
    decoding = Decoding([0, 0, 1], dim=8, value_dim=4)
    for num_new in (1, 2, 1):
        torch.testing.assert_close(*decoding.step(num_new))


def test_scores_are_computed_for_some_queries_at_a_time(monkeypatch):
    monkeypatch.setattr(softcap, "CHUNK_SCORES", 1)
    torch.testing.assert_close(*Decoding([0, 0, 1]).step(4, softcap=2.0))


def test_outside_of_the_window_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(group_cache, "ROOM", 2)
    decoding = Decoding([0, 0], window=3)
    for _ in range(20):
        decoding.step(1)
    buffer, _ = decoding.layer.buffers_for(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8))
    assert buffer.shape[2] <= 3 + 1 + 2
    assert decoding.layer.visible_prompts(1)[0].shape[2] == 0
    assert decoding.layer.get_seq_length() == 5 + 20


def test_a_prompt_is_not_copied_for_its_completions():
    cache: Any = DynamicCache()
    cache.update(torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), 0)
    found = expanded_cache(cache, torch.tensor([0, 0, 1]), torch.tensor([0, 1]), {0})
    (layer,) = found.layers
    assert isinstance(layer, GroupCacheLayer)
    assert layer.of_prompts[0] is cache.layers[0].keys
    copied: Any = expanded_cache(cache, torch.tensor([0, 0, 1]), torch.tensor([0, 1]), set())
    assert copied.layers[0].keys.shape == (3, 2, 5, 8)
    assert cache.layers[0].keys.shape == (2, 2, 5, 8)


def config(**settings: Any) -> Any:
    text = SimpleNamespace(**settings)
    return SimpleNamespace(get_text_config=lambda: text)


def test_layers_that_hold_prompts_once():
    cache = DynamicCache()
    for i in range(3):
        cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), i)
    assert group_layers(cache, config()) == {0, 1, 2}
    assert group_layers(cache, config(cross_attention_layers=[1])) == {0, 2}
    assert group_layers(cache, config(kv_lora_rank=4)) == set()
    cache.layers.append(type("OtherLayer", (DynamicLayer,), {})())
    assert group_layers(cache, config()) == set()


def test_keys_of_another_kind_are_refused():
    decoding = Decoding([0, 0])
    layout = GroupLayout(decoding.groups, [decoding.layer], 1, 6)
    key, value = decoding.layer.update(torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8))
    with pytest.raises(ModelError, match="not those of its cache"):
        layout.attend(torch.randn(2, 4, 1, 8), key * 2, value, SCALE, None)
    assert layout[:, :, :, :6] is layout
    with pytest.raises(ModelError, match="computes a part"):
        layout[:, :, :, :5]


@pytest.mark.parametrize("queries", [1, 5])
def test_the_kernel_on_cuda_gets_shapes_that_it_takes(queries):
    """Its log-sum-exps are padded to multiples of 32 queries, and its bias is aligned."""
    with FakeTensorMode():
        query, key, value = (
            torch.empty(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((6, 4, queries, 64), (6, 1, 19, 64), (6, 1, 19, 64))
        )
        mask = torch.ones(1, 1, 1, 19, dtype=torch.bool, device="cuda")
        for given in (None, mask):
            output, lse = attention_with_lse(query, key, value, given, SCALE, None)
            assert (output.shape, output.dtype) == ((6, 4, queries, 64), torch.bfloat16)
            assert (lse.shape, lse.dtype) == ((6, 4, queries), torch.float32)


def test_the_fused_kernel_and_plain_scores_agree():
    query, key, value = torch.randn(3, 4, 5, 8), torch.randn(3, 1, 7, 8), torch.randn(3, 1, 7, 8)
    mask = torch.rand(3, 1, 5, 7) < 0.5
    mask[..., 0] = True
    for given in (None, mask, mask[:1, :, :1]):
        fused = attention_with_lse(query, key, value, given, SCALE, None)
        scores = query @ key.mT * SCALE
        scores = scores if given is None else scores.masked_fill(~given, -torch.inf)
        torch.testing.assert_close(fused, (scores.softmax(-1) @ value, scores.logsumexp(-1)))


def test_a_query_that_sees_nothing_gets_no_weight():
    query, key, value = torch.randn(1, 2, 1, 8), torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    output, lse = attention_with_lse(query, key, value, torch.zeros(1, 1, 1, 4, dtype=torch.bool), SCALE, None)
    assert output.isfinite().all()
    assert torch.sigmoid(lse - 1.0).eq(0).all()
