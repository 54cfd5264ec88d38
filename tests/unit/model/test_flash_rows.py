"""The two calls of a causal packed row, with kernels in plain operators in place of those of a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, or_masks

from rl_vlm.model import flash_rows, flex_kernels, shared_prefix
from rl_vlm.model.flash_rows import FlashRow, Sequences, fits_flash, has_flash
from rl_vlm.model.shared_prefix import RowLayout, shared_attention

CAUSAL: Any = causal_mask_function
CPU = torch.device("cpu")
ROWS = [
    ([7, 5], [[4, 3, 6], [2]]),
    ([6], [[5, 5]]),
    ([3, 2], [[0], [0, 0]]),
]  # fmt: skip


def scores(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> Tensor:
    """Scores of one sequence, (heads, queries, keys), with two query heads per key head."""
    found = query.transpose(0, 1) @ key.transpose(0, 1).repeat_interleave(query.shape[1] // key.shape[1], 0).mT * scale
    return found.masked_fill(~torch.ones_like(found).tril().bool(), -torch.inf) if is_causal else found


def pieces(queries: Sequences, keys: Sequences) -> list[tuple[slice, slice]]:
    starts = [each.starts.tolist() for each in (queries, keys)]
    of_queries, of_keys = ([slice(*pair) for pair in pairwise(some)] for some in starts)
    longest = [max(piece.stop - piece.start for piece in some) for some in (of_queries, of_keys)]
    assert longest == [queries.longest, keys.longest]
    return list(zip(of_queries, of_keys, strict=True))


def forward(
    query: Tensor, key: Tensor, value: Tensor, queries: Sequences, keys: Sequences, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    output, log_sums = torch.full_like(query, torch.nan), query.new_full(query.shape[1::-1], torch.nan)
    for q, k in pieces(queries, keys):
        found = scores(query[q], key[k], scale, is_causal)
        values = value[k].transpose(0, 1).repeat_interleave(2, 0)
        output[q], log_sums[:, q] = (found.softmax(-1) @ values).transpose(0, 1), found.logsumexp(-1)
    return output, log_sums


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor, queries: Sequences,
    keys: Sequences, scale: float, is_causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As the kernels do: from the output and the log-sum-exps that are given (Dao, 2023, algorithm 2)."""
    found = [torch.zeros_like(x) for x in (query, key, value)]
    for q, k in pieces(queries, keys):
        weights = (scores(query[q], key[k], scale, is_causal) - log_sums[:, q, None]).exp()
        of_output = gradient[q].transpose(0, 1)
        values, tall = value[k].transpose(0, 1).repeat_interleave(2, 0), key[k].transpose(0, 1).repeat_interleave(2, 0)
        row_sums = (of_output * output[q].transpose(0, 1)).sum(-1, keepdim=True)
        of_scores = weights * (of_output @ values.mT - row_sums) * scale
        found[0][q] = (of_scores @ tall).transpose(0, 1)
        for to, heads in ((found[1], of_scores.mT @ query[q].transpose(0, 1)), (found[2], weights.mT @ of_output)):
            to[k] = heads.unflatten(0, (-1, 2)).sum(1).transpose(0, 1)
    return tuple(found)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_rows, "flash_forward", forward)
    monkeypatch.setattr(flash_rows, "flash_backward", backward)
    monkeypatch.setattr(shared_prefix, "fits_flash", lambda *tensors: True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("prefixes", "completions"), ROWS)
def test_outputs_and_gradients_are_those_of_two_calls_of_sdpa(
    prefixes: list[int], completions: list[list[int]]
) -> None:
    layout = RowLayout.build(prefixes, completions)
    tokens = len(layout.output_index)
    query, key, value = (torch.randn(heads, tokens, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(tokens, 4, 8, dtype=torch.float64)
    found = []
    for each in (replace(layout, masks=FlashRow.build(layout.sections, CPU)), layout.with_masks(CAUSAL)):
        output = shared_attention(query, key, value, each, 0.7)
        found.append([output, *torch.autograd.grad((output * weights).sum(), (query, key, value))])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_the_sequences_of_a_row_are_where_they_are() -> None:
    row = FlashRow.build([[3, 2, 1], [2, 4]], CPU)
    assert row.parts.starts.tolist() == [0, 3, 5, 6, 8, 12] and row.parts.longest == 4
    assert row.prefixes.starts.tolist() == [0, 3, 5] and row.prefixes.longest == 3
    assert row.completions.starts.tolist() == [0, 3, 7] and row.completions.longest == 4
    assert row.prefix_rows.tolist() == [0, 1, 2, 6, 7]
    assert row.completion_rows.tolist() == [3, 4, 5, 8, 9, 10, 11]
    assert row.parts.starts.dtype == torch.int32


@pytest.mark.parametrize(
    ("setting", "rule", "expected"),
    [
        ("flash", CAUSAL, FlashRow),
        ("flash", or_masks(CAUSAL, CAUSAL), str),
        ("auto", CAUSAL, str),
        ("flex", CAUSAL, str),
        ("sdpa", CAUSAL, shared_prefix.RowMasks),
    ],
)
def test_causal_layers_take_the_kernels(
    setting: Any, rule: Any, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "has_flash", lambda device: True)
    monkeypatch.setattr(shared_prefix, "has_kernels", lambda device: True)
    with mock.patch.object(RowLayout, "block_mask", return_value="blocks"):
        assert isinstance(RowLayout.build([3], [[2]]).with_masks(rule, setting).masks, expected)


@pytest.mark.parametrize(
    ("dtype", "head", "value_head", "shared_memory", "expected"),
    [
        (torch.bfloat16, 128, 128, flex_kernels.SMALLEST, True),
        (torch.float16, 80, 80, flex_kernels.SMALLEST, True),
        (torch.float32, 128, 128, flex_kernels.ROOMY, False),
        (torch.bfloat16, 256, 256, flex_kernels.SMALLEST, False),
        (torch.bfloat16, 256, 256, flex_kernels.ROOMY, True),
        (torch.bfloat16, 512, 512, flex_kernels.ROOMY, False),
        (torch.bfloat16, 192, 128, flex_kernels.ROOMY, False),
        (torch.bfloat16, 20, 20, flex_kernels.ROOMY, False),
    ],
)
def test_heads_that_the_kernels_take(
    dtype: torch.dtype, head: int, value_head: int, shared_memory: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_rows, "shared_memory_of", lambda device: shared_memory)
    query, value = torch.zeros(2, 3, head), torch.zeros(2, 3, value_head, dtype=dtype)
    assert fits_flash(query, query, value) == expected


@pytest.mark.usefixtures("kernels")
def test_heads_that_they_do_not_take_have_one_mask_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "fits_flash", lambda *tensors: False)
    layout = RowLayout.build([3], [[2, 2]])
    row, expected = torch.randn(2, 7, 16), layout.with_masks(CAUSAL)
    as_flash = replace(layout, masks=FlashRow.build(layout.sections, CPU))
    with mock.patch.object(RowLayout, "block_mask", autospec=True, side_effect=RowLayout.block_mask) as made:
        for _ in range(2):
            found = shared_attention(row, row, row, as_flash, 0.5)
            torch.testing.assert_close(found, shared_attention(row, row, row, expected, 0.5))
    assert made.call_count == 1


def test_a_cpu_has_no_kernels() -> None:
    assert not has_flash(torch.device("cpu"))


def test_pytorch_has_the_kernels_that_are_called() -> None:
    """With the same arguments, and results of these shapes."""
    sequences = Sequences(torch.tensor([0, 3, 5], dtype=torch.int32, device="meta"), 3)
    query, key = (torch.empty(5, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    output, log_sums = flash_rows.flash_forward(query, key, key, sequences, sequences, 0.5, is_causal=True)
    assert (output.shape, log_sums.shape) == ((5, 4, 16), (4, 5))
    found = flash_rows.flash_backward(
        output, query, key, key, output, log_sums, sequences, sequences, 0.5, is_causal=True
    )
    assert [tuple(each.shape) for each in found] == [(5, 4, 16), (5, 2, 16), (5, 2, 16)]
