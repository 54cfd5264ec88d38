"""Layers with a state, over the row of `RowLayout.build`'s example, against transformers' functions on one sequence."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_chunk_gated_delta_rule

from rl_vlm.model import shared_state
from rl_vlm.model.shared_prefix import RowLayout
from rl_vlm.model.shared_state import (
    Packing,
    SharedRow,
    chunk_size,
    convolve_row,
    delta_rule_of_row,
    routed,
)

SEQUENCES = [[0, 1, 2, 3, 4], [0, 1, 2, 5], [6, 7, 8]]
"""Row positions of each completion behind its prompt."""


@pytest.fixture
def layout() -> RowLayout:
    return RowLayout.build(prefix_lengths=[3, 2], completion_lengths=[[2, 1], [1]])


def test_sequences_are_packed_behind_the_last_inputs_before_them(layout: RowLayout) -> None:
    packing = Packing.of(layout, 3)
    found = [int(i) if valid else None for i, valid in zip(packing.source, packing.is_input, strict=True)]
    assert found == [
        None, None, None, 0, 1, 2, None, None, None, 6, 7, 0, 1, 2, 3, 4, 0, 1, 2, 5, None, 6, 7, 8,
    ]  # fmt: skip
    assert packing.source[packing.place].tolist() == list(range(9))
    assert packing.prefix_bounds.tolist() == [0, 6, 11]
    assert packing.completion_bounds.tolist() == [0, 5, 9, 13]


def test_a_convolution_sees_the_past_of_its_own_completion(layout: RowLayout) -> None:
    row, sum_of_three = torch.arange(1.0, 10.0)[None, None], torch.ones(1, 3)
    # prefix 1 2 3, completions 4 5 and 6 behind it; prefix 7 8, completion 9
    sums = convolve_row(causal_conv1d_fn, SharedRow(layout), row, sum_of_three, None)
    assert sums[0, 0].tolist() == [1, 3, 6, 9, 12, 11, 7, 15, 24]


def test_convolutions_of_other_widths_in_one_row_see_other_pasts(layout: RowLayout) -> None:
    row, inputs = SharedRow(layout), torch.arange(1.0, 10.0)[None, None]
    sums = [convolve_row(causal_conv1d_fn, row, inputs, torch.ones(1, width), None)[0, 0] for width in (2, 3, 2)]
    assert sums[1].tolist() == [1, 3, 6, 9, 12, 11, 7, 15, 24]
    assert sums[0].tolist() == sums[2].tolist() == [1, 3, 5, 7, 9, 9, 7, 15, 17]
    assert [len(row.packing(num_past).source) for num_past in (1, 2)] == [9 + 5 * 1, 9 + 5 * 2]


def test_a_convolution_is_that_of_each_sequence(layout: RowLayout) -> None:
    row, weight = torch.randn(1, 5, 9, requires_grad=True), torch.randn(5, 4)
    ours = convolve_row(causal_conv1d_fn, SharedRow(layout), row, weight, None, activation="silu")

    def alone(index: list[int]) -> Tensor:
        return causal_conv1d_fn(row[..., index], weight, None, activation="silu")

    for index in SEQUENCES:
        torch.testing.assert_close(ours[..., index], alone(index))
    scale = torch.randn(5, 1)
    ours_of_tail = sum((ours[..., index[-1:]] * scale).sum() for index in SEQUENCES)
    tail_alone = sum((alone(index)[..., -1:] * scale).sum() for index in SEQUENCES)
    torch.testing.assert_close(gradients(ours_of_tail, row), gradients(tail_alone, row))


def inputs_of_rule() -> dict[str, Tensor]:
    """Of two heads. Decays are logarithms, below 0."""
    shapes = {"query": (9, 2, 4), "key": (9, 2, 4), "value": (9, 2, 3), "g": (9, 2), "beta": (9, 2)}
    made = {name: torch.randn(1, *shape) for name, shape in shapes.items()}
    made |= {"g": -made["g"].abs(), "beta": made["beta"].sigmoid()}
    return {name: value.requires_grad_() for name, value in made.items()}


def apply_rule(rule: Any, query: Tensor, key: Tensor, value: Tensor, **gates: Tensor) -> Tensor:
    """Call a rule as transformers' layers do."""
    return rule(query, key, value, **gates, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True)[
        0
    ]


def gradients(of: Any, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(of, inputs, retain_graph=True))


def of_row(rule: Any, layout: RowLayout) -> Any:
    """The rule over the row."""
    return lambda *args, **kwargs: delta_rule_of_row(rule, SharedRow(layout), *args, **kwargs)


def variable_lengths(*tensors: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None, **options: Any) -> Any:
    """transformers' rule on each of the sequences in one row, by the arguments of flash-linear-attention."""
    bounds = cu_seqlens.tolist()
    assert all(tensor.shape[:2] == (1, bounds[-1]) for tensor in tensors)
    gates = {name: options.pop(name) for name in ("g", "beta")}
    found = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            assert initial_state is not None
            found.append((tensors[2][:, :0], initial_state[i : i + 1]))
            continue
        state = None if initial_state is None else initial_state[i : i + 1]
        parts = {name: gate[:, start:end] for name, gate in gates.items()}
        sequence = (tensor[:, start:end] for tensor in tensors)
        found.append(torch_chunk_gated_delta_rule(*sequence, **parts, initial_state=state, **options))
    outputs, states = zip(*found, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(states) if options["output_final_state"] else None


@pytest.mark.parametrize("rule", [torch_chunk_gated_delta_rule, variable_lengths], ids=["padded", "packed"])
def test_a_delta_rule_is_that_of_each_sequence(rule: Any, layout: RowLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "has_variable_lengths", lambda: rule is variable_lengths)
    inputs = inputs_of_rule()
    ours = apply_rule(of_row(rule, layout), **inputs)
    alone = [
        apply_rule(torch_chunk_gated_delta_rule, **{name: value[:, index] for name, value in inputs.items()})
        for index in SEQUENCES
    ]
    for index, expected in zip(SEQUENCES, alone, strict=True):
        torch.testing.assert_close(ours[:, index], expected)
    # the gradients of completions alone, which reach prefixes through the state only
    ours_of_tail = sum(ours[:, index[-1]].square().sum() for index in SEQUENCES)
    tail_alone = sum(expected[:, -1].square().sum() for expected in alone)
    tensors = list(inputs.values())
    torch.testing.assert_close(gradients(ours_of_tail, *tensors), gradients(tail_alone, *tensors))


def test_completions_of_one_token_need_no_second_call() -> None:
    layout, inputs = RowLayout.build([4, 5], [[0], [0, 0]]), inputs_of_rule()
    calls = []

    def rule(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["initial_state"])
        return torch_chunk_gated_delta_rule(*args, **kwargs)

    ours = apply_rule(of_row(rule, layout), **inputs)
    assert ours.shape == (1, 9, 2, 3)
    assert calls == [None]


@pytest.mark.parametrize(("tokens", "chunk"), [(0, 1), (5, 5), (64, 64), (65, 33), (200, 50), (1040, 62)])
def test_chunks_are_as_even_as_their_number_allows(tokens: int, chunk: int) -> None:
    assert chunk_size(tokens) == chunk


def test_functions_are_replaced_in_shared_rows_only(layout: RowLayout) -> None:
    function = routed(lambda *args, **kwargs: ("stock", args, kwargs), lambda stock, *args, **kwargs: (args, kwargs))
    assert function(1, seq_idx=None) == ("stock", (1,), {"seq_idx": None})
    row = SharedRow(layout)
    assert function(1, seq_idx=row, bias=2) == ((row, 1), {"bias": 2})
    assert row.num_calls == 1


def test_the_packed_rule_takes_completions_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "has_variable_lengths", lambda: True)
    layout, inputs = RowLayout.build([3, 2], [[0, 2], [2, 0]]), inputs_of_rule()
    ours = apply_rule(of_row(variable_lengths, layout), **inputs)
    for index in ([0, 1, 2, 3, 4], [5, 6, 7, 8]):
        alone = apply_rule(torch_chunk_gated_delta_rule, **{name: x[:, index] for name, x in inputs.items()})
        torch.testing.assert_close(ours[:, index], alone)
