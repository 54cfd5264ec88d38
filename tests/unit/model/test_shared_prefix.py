from dataclasses import replace
from threading import Thread
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

from rl_vlm.errors import ModelError, is_out_of_memory
from rl_vlm.model import shared_prefix
from rl_vlm.model.shared_prefix import RowLayout, attention_layout, shared_attention

F, T = False, True
CAUSAL = cast(Any, causal_mask_function)


@pytest.fixture
def layout():
    """Row: prefix aaa with completions AA and A, prefix bb with completion B."""
    return RowLayout.build(prefix_lengths=[3, 2], completion_lengths=[[2, 1], [1]])


def test_the_example_of_the_docstring(layout):
    assert layout.prefix_index.tolist() == [[0, 1, 2], [6, 7, 0]]
    assert layout.completion_index.tolist() == [[3, 4], [5, 0], [8, 0]]
    assert layout.predictor_index.tolist() == [2, 3, 4, 2, 5, 7, 8]


def test_a_completion_sees_its_prefix_and_its_own_past(layout):
    masks = layout.with_masks(CAUSAL).masks
    assert masks.prefix is None
    assert masks.completion[:, 0].tolist() == [
        # prefix   itself
        [[T, T, T, T, F], [T, T, T, T, T]],
        [[T, T, T, T, F], [T, T, T, T, T]],  # the second query is padding
        [[T, T, F, T, F], [T, T, T, T, T]],  # so it is here
    ]


def test_a_models_own_rule_holds_where_each_completion_follows_its_prefix_at_once(layout):
    window_of_two = and_masks(sliding_window_overlay(2), causal_mask_function)
    masks = layout.with_masks(window_of_two).masks
    assert masks.prefix[:, 0].tolist() == [
        [[T, F, F], [T, T, F], [F, T, T]],
        [[T, F, F], [T, T, F], [T, T, T]],  # the third query is padding
    ]
    assert masks.completion[:, 0].tolist() == [
        [[F, F, T, T, F], [F, F, F, T, T]],
        [[F, F, T, T, F], [T, T, T, T, T]],
        [[F, T, F, T, F], [T, T, T, T, T]],
    ]


def test_rules_that_look_up_the_kind_of_a_token_find_that_of_the_row(layout):
    is_image = torch.tensor([[F, T, T, F, F, F, T, F, F]])  # in the prefixes
    within_image = or_masks(causal_mask_function, lambda b, h, q, k: is_image[b, q] & is_image[b, k])
    masks = layout.with_masks(within_image).masks
    assert masks.prefix[:, 0].tolist() == [
        [[T, F, F], [T, T, T], [T, T, T]],
        [[T, F, F], [T, T, F], [T, T, T]],
    ]
    assert masks.completion.equal(layout.with_masks(CAUSAL).masks.completion)


def test_images_of_completions_see_themselves_in_both_directions():
    """Row: prefix pp, completions aii and iib; the logical positions of the second are places of the first's."""
    layout = RowLayout.build(prefix_lengths=[2], completion_lengths=[[3, 3]])
    image = torch.tensor([0, 0, 0, 1, 1, 2, 2, 0])
    within_image = or_masks(
        causal_mask_function, lambda b, h, q, k: (image[q] == image[k]) & (image[q] > 0) & (image[k] > 0)
    )
    masks: Any = layout.with_masks(within_image).masks
    assert masks.completion[:, 0].tolist() == [
        # prefix itself
        [[T, T, T, F, F], [T, T, T, T, T], [T, T, T, T, T]],
        [[T, T, T, T, F], [T, T, T, T, F], [T, T, T, T, T]],
    ]
    blocks = layout.block_mask(within_image).mask_mod
    row = torch.arange(8)
    zero = torch.tensor(0)
    assert blocks(zero, zero, row[:, None], row).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1, 1, 1],
    ]


def test_tokens_that_are_not_predicted_have_no_predictor():
    """Row: prefix ppp, completion aab with the second token observed, completion c."""
    sampled = [torch.tensor([T, F, T, T]), torch.tensor([T, T])]
    layout = RowLayout.build(prefix_lengths=[3], completion_lengths=[[3, 1]], predicted=sampled)
    assert layout.predictor_index.tolist() == [2, 4, 5, 2, 6]


def test_outputs_of_both_attentions_come_back_in_the_order_of_the_row(layout):
    # places: prefixes 0 1 2 | 3 4 (5 padding), then completions 6 7 | 8 (9) | 10 (11)
    assert layout.output_index.tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 10]


def test_completions_of_one_token_need_no_place_in_the_row():
    layout = RowLayout.build([3, 2], [[0], [0, 0]])
    assert layout.completion_index.shape == (3, 0)
    assert layout.predictor_index.tolist() == [2, 4, 4]
    row = torch.randn(2, 5, 4)
    layout = layout.with_masks(CAUSAL)
    assert shared_attention(row, row, row, layout, scale=0.5).shape == (5, 2, 4)


RULES = pytest.mark.parametrize("rule", [CAUSAL, or_masks(CAUSAL, bidirectional_mask_function)])
SOFTCAPS = pytest.mark.parametrize("softcap", [None, 0.5])


@RULES
@SOFTCAPS
def test_attention_is_that_of_the_whole_row_under_a_mask(layout, rule, softcap):
    query, key, value = torch.randn(4, 9, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 8)  # two query heads a key head
    query.requires_grad_()
    owner = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1])
    part = torch.tensor([0, 0, 0, 1, 1, 2, 0, 0, 3])  # 0 is a prefix
    sees = (owner[:, None] == owner) & ((part == 0) | (part[:, None] == part))
    sees = sees & ~((part[:, None] == 0) & (part != 0))  # a prefix never sees a completion
    sees = sees.tril() if rule is CAUSAL else sees
    scores = query @ key.repeat_interleave(2, dim=0).mT * 0.3
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    expected = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value.repeat_interleave(2, dim=0)
    ours = shared_attention(query, key, value, layout.with_masks(rule), 0.3, softcap)
    torch.testing.assert_close(ours.transpose(0, 1), expected, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(ours.sum(), query)
    assert gradient.isfinite().all()


@RULES
@SOFTCAPS
def test_one_flex_attention_over_the_row_is_the_same(layout, rule, softcap):
    query, key, value = torch.randn(4, 9, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    expected = shared_attention(query, key, value, layout.with_masks(rule), 0.3, softcap)
    blocks = replace(layout, masks=layout.block_mask(rule))
    torch.testing.assert_close(shared_attention(query, key, value, blocks, 0.3, softcap), expected)


@SOFTCAPS
@pytest.mark.ci
def test_its_compiled_gradients_are_the_same(softcap, monkeypatch):
    """As a GPU compiles it, but without Triton, and without the check that refuses gradients on a CPU."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(shared_prefix.flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(shared_prefix, "flex_attention", compiled)
    rule = or_masks(CAUSAL, bidirectional_mask_function)
    for lengths in ([40, 23], [50, 11]):
        layout = RowLayout.build([90, 30], [lengths, [17]])
        row = len(layout.output_index)
        query, key, value = (
            torch.randn(heads, row, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
        )
        both = [layout.with_masks(rule), replace(layout, masks=layout.block_mask(rule))]
        outputs = [shared_attention(query, key, value, layout, 0.9, softcap) for layout in both]
        torch.testing.assert_close(*outputs)
        weights = torch.randn_like(outputs[0])
        of_split, of_row = (torch.autograd.grad((output * weights).sum(), (query, key, value)) for output in outputs)
        torch.testing.assert_close(of_row, of_split)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_short_rows_do_not_take_the_kernel_for_decoding(monkeypatch):
    """It has no tile for more than 128 query tokens times query heads per key head."""
    options = []

    def capture(graph, inputs):
        options.extend(node.args[6] for node in graph.graph.nodes if node.target is flex_attention_hop)
        return graph.forward

    compiled = torch.compile(shared_prefix.flex_attention, dynamic=True, fullgraph=True, backend=capture)
    monkeypatch.setattr(shared_prefix, "flex_attention", compiled)
    layout = RowLayout.build([40], [[20]])
    blocks = replace(layout, masks=layout.block_mask(CAUSAL))
    shared_attention(torch.randn(8, 60, 16), torch.randn(1, 60, 16), torch.randn(1, 60, 16), blocks, 0.3)
    assert [each["FORCE_USE_FLEX_ATTENTION"] for each in options] == [True]


def test_two_calls_with_expanded_heads_are_the_same(layout):
    query, key, value = torch.randn(4, 9, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    grouped, expanded = (layout.with_masks(CAUSAL, setting) for setting in ("auto", "sdpa"))
    assert expanded.masks.expands_heads
    torch.testing.assert_close(*(shared_attention(query, key, value, each, 0.3) for each in (grouped, expanded)))


def test_each_thread_may_have_more_graphs(layout):
    """Autograd recomputes layers in a thread of its own, whose limit is PyTorch's until then."""
    found = []

    def attend():
        blocks = replace(layout, masks=layout.block_mask(CAUSAL))
        shared_attention(torch.randn(4, 9, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16), blocks, 0.3)
        found.append(torch._dynamo.config.recompile_limit)

    thread = Thread(target=attend)
    thread.start()
    thread.join()
    assert found == [64]


def test_two_calls_have_masks_for_sdpa_on_every_device(layout):
    with FakeTensorMode():
        on_cuda = replace(layout, owner_N=torch.zeros(3, dtype=torch.int64, device="cuda"))
    with (
        mock.patch.object(RowLayout, "dense_masks", return_value=layout.dense_masks(CAUSAL)),
        mock.patch.object(RowLayout, "block_mask", return_value=None) as blocks,
    ):
        on_cuda.with_masks(CAUSAL, "sdpa")
        assert not blocks.called
        on_cuda.with_masks(CAUSAL, "flex")
        assert blocks.called


def test_an_error_of_the_compiler_names_the_heads_and_the_setting(layout, monkeypatch):
    def fail(*args, **kwargs):
        raise TorchDynamoException("No choices exist for backend.")

    monkeypatch.setattr(shared_prefix, "flex_attention", fail)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    blocks = replace(layout, masks=layout.block_mask(CAUSAL))
    with pytest.raises(
        ModelError, match=r"on NVIDIA L4: No choices .*shared_attention: sdpa, .* heads of 16 values"
    ) as raised:
        shared_attention(torch.randn(4, 9, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16), blocks, 0.3)
    assert not is_out_of_memory(raised.value)


def test_out_of_memory_while_it_compiles_stays_out_of_memory(layout, monkeypatch):
    error = TorchDynamoException("InductorError")
    monkeypatch.setattr(error, "inner_exception", torch.OutOfMemoryError("CUDA out of memory."), raising=False)
    monkeypatch.setattr(shared_prefix, "flex_attention", mock.Mock(side_effect=error))
    blocks = replace(layout, masks=layout.block_mask(CAUSAL))
    with pytest.raises(RuntimeError) as raised:
        shared_attention(torch.randn(4, 9, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16), blocks, 0.3)
    assert is_out_of_memory(raised.value)


def test_a_part_of_a_layouts_mask_is_refused(layout):
    everything = slice(None)
    assert layout[everything, everything, slice(0, None), everything] is layout
    with pytest.raises(ModelError, match=r"Set memory\.prefix_sharing: dense"):
        layout[everything, everything, slice(-1, None), everything]


def test_a_layout_is_active_only_inside(layout):
    from rl_vlm.model.shared_prefix import active_layout

    with pytest.raises(ZeroDivisionError), attention_layout(layout):
        assert active_layout.get() is layout
        with attention_layout(None):
            assert active_layout.get() is None
        assert active_layout.get() is layout
        raise ZeroDivisionError
    assert active_layout.get() is None
