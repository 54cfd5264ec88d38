"""The attention of a packed row by the kernels that CUDA would run, in Triton's interpreter, against plain attention.

    TRITON_INTERPRET=1 python -m tests.integration.interpreted_attention NAME…

runs some of `CASES`, and prints the largest errors of each as a line of JSON. Inductor's whole output is run: all
kernels, with the arguments and grids that it gives them, and the saved tensors between forward and backward. Plain
attention is computed in float64, under a matrix of the allowed pairs that is made from the lengths of the sections.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_compat import libdevice
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)
from triton.runtime.interpreter import TensorHandle

from benchmarks.absent_card import CARDS, Card, standing_in
from benchmarks.cuda_source import compiled_for
from rl_vlm.model import shared_prefix
from rl_vlm.model.flex_kernels import kernel_options, tiles
from rl_vlm.model.shared_prefix import RowLayout, block_attention

Lengths = Sequence[tuple[int, Sequence[int]]]
"""Tokens of each prompt and of its completions."""
SHORT: Lengths = ((90, [40, 61]), (41, [30, 7]))
LONG: Lengths = ((300, [150, 61]), (41, [90, 7]), (97, [1, 64]))
"""269 and 811 tokens. Blocks have 128."""
QUERY_HEADS, KEY_HEADS = 4, 2
WINDOW = 70
INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class Call:
    """The arguments of `block_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: BlockMask
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class Case:
    """A row, the rule of a model, and what is wrong with the call."""

    rule: str = "causal"
    lengths: Lengths = LONG
    softcap: float | None = None
    head_dim: int = 64
    card: str = "a100"
    options: dict[str, Any] = field(default_factory=lambda: tiles("bwd", 64))
    """Added to the product's options. PyTorch's tiles for bfloat16 are 64 tokens wide. Those for float32 are 16, with
    which the interpreter takes 16 times as long."""
    fault: Callable[[Call], Call] = lambda call: call


def blocks_shifted(call: Call) -> Call:
    """Replace each partial block of keys by its neighbour."""
    mask = call.mask
    indices = (mask.kv_indices + 1) % mask.kv_indices.shape[-1]
    partial = mask.kv_num_blocks, indices
    full = mask.full_kv_num_blocks, mask.full_kv_indices
    shifted = BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod, seq_lengths=mask.seq_lengths
    )
    return replace(call, mask=shifted)


def with_mask(call: Call, **fields: Any) -> Call:
    """Change fields of the mask."""
    mask = copy.copy(call.mask)
    vars(mask).update(fields)
    return replace(call, mask=mask)


def without_query_blocks(call: Call) -> Call:
    """Leave out the blocks of queries that attend to each block of keys. Only the backward needs them."""
    counts = {name: torch.zeros_like(vars(call.mask)[name]) for name in ("q_num_blocks", "full_q_num_blocks")}
    return with_mask(call, **counts)


def tensors_of_another_row(call: Call) -> Call:
    """Evaluate the rule with the sections of another row of the same length."""
    other = layout_of(SHORT[::-1]).block_mask(rule_of(Case(lengths=SHORT)))
    return with_mask(call, mask_mod=other.mask_mod)


FAULTS: dict[str, Callable[[Call], Call]] = {
    "blocks shifted": blocks_shifted,
    "no query blocks": without_query_blocks,
    "tensors of another row": tensors_of_another_row,
    "no scale": lambda call: replace(call, scale=1.0),
    "groups of heads swapped": lambda call: replace(call, key=call.key.flip(0), value=call.value.flip(0)),
    "no soft cap": lambda call: replace(call, softcap=None),
}
CASES: dict[str, Case] = {
    "causal": Case(),
    "sliding window": Case("sliding window"),
    "images see themselves": Case("images"),
    "images see themselves, sliding window": Case("images, sliding window"),
    "prompts see themselves": Case("prompts"),
    "soft cap": Case(softcap=2.0),
    "heads of 128": Case(lengths=SHORT, head_dim=128),
    "heads of 256 on an RTX 3090": Case(lengths=SHORT, head_dim=256, card="3090", options={}),
    "heads of 512": Case(lengths=SHORT, head_dim=512, options={}),
    "no fault": Case(lengths=SHORT, softcap=2.0),
} | {name: Case(lengths=SHORT, softcap=2.0, fault=fault) for name, fault in FAULTS.items()}


def layout_of(lengths: Lengths) -> RowLayout:
    prompts, completions = zip(*lengths, strict=True)
    return RowLayout.build(prompts, completions)


def images_of(lengths: Lengths) -> Tensor:
    """Return the image of each token of the row, -1 for text. Each prompt has two images of a third of its tokens."""
    images = []
    for prompt, completions in lengths:
        third = prompt // 3
        images += [0] * third + [-1] + [1] * third + [-1] * (prompt - 2 * third - 1 + sum(completions))
    return torch.tensor(images)


def prompts_of(lengths: Lengths) -> Tensor:
    """Return 0 for the tokens of prompts, -1 for those of completions."""
    return torch.tensor([id for prompt, rest in lengths for id in [0] * prompt + [-1] * sum(rest)])


def rule_of(case: Case) -> Any:
    """Return the rule in transformers' form, as the models make it."""
    window = sliding_window_causal_mask_function(WINDOW)
    images, prompts = (blockwise_overlay(ids(case.lengths)[None]) for ids in (images_of, prompts_of))
    return {
        "causal": causal_mask_function,
        "sliding window": window,
        "images": or_masks(causal_mask_function, images),
        "images, sliding window": or_masks(window, images),
        "prompts": or_masks(causal_mask_function, prompts),
    }[case.rule]


def allowed_pairs(case: Case) -> Tensor:
    """Return whether each query of the row may attend to each key."""
    sections = [
        (prompt, part, length if part else 0, count)
        for prompt, (length, completions) in enumerate(case.lengths)
        for part, count in enumerate([length, *completions])
    ]
    rows = [(*section, start + offset) for *section, start, count in sections for offset in range(count)]
    owner, part, place = torch.tensor(rows).T
    distance = place[:, None] - place
    allowed = distance >= 0
    if "window" in case.rule:
        allowed &= distance < WINDOW
    if "images" in case.rule:
        image = images_of(case.lengths)
        allowed |= (image[:, None] == image) & (image >= 0)
    if case.rule == "prompts":
        allowed |= (part[:, None] == 0) & (part == 0)
    return allowed & (owner[:, None] == owner) & ((part == 0) | (part[:, None] == part))


class Interpreted:
    """A kernel of a lowered graph, which is launched in Triton's interpreter."""

    def __init__(self, name: str, source: str) -> None:
        self.tuner: Any = getattr(PyCodeCache.load(source), name)

    def run(self, *args: Any, stream: int) -> None:
        config, function = self.tuner.configs[0], self.tuner.fn
        names = [name for name in function.arg_names if name not in config.kwargs]
        given = dict(zip(names + self.tuner.inductor_meta.get("extra_launcher_args", []), args, strict=True))
        grid = GridExpr.from_meta(self.tuner.inductor_meta, config).eval_slow(given)
        function[grid](**{name: given[name] for name in names}, **config.kwargs)


def tanh(x: Any) -> Any:
    """Compute `libdevice.tanh`, which the interpreter does not have."""
    return type(x)(TensorHandle(np.tanh(x.handle.data), x.handle.dtype), x.type)


def interpreted(source: str, card: Card) -> Callable[..., Sequence[Any]]:
    """Return a lowered graph as a function of tensors on the CPU."""
    scope: dict[str, Any] = {"__name__": "lowered"}
    kernel = mock.patch.object(AsyncCompile, "triton", lambda self, name, code, **device: Interpreted(name, code))
    with standing_in(card), kernel:
        exec(source, scope)
    scope["empty_strided_cuda"] = scope["empty_strided_cpu"]

    def run(*args: Any) -> Sequence[Any]:
        with standing_in(card), mock.patch.object(libdevice, "tanh", tanh):
            return scope["call"](list(args))

    return run


def attend(call: Call, weights: Tensor, inputs: Sequence[Tensor], case: Case) -> dict[str, Tensor]:
    """Return the output, the log-sum-exp and the gradients of the interpreted kernels."""
    card, log_sums = CARDS[case.card], []

    def make_graph(graph: GraphModule, source: str, is_backward: bool) -> Callable[..., Any]:
        compute = interpreted(source, card)

        def run(*args: Any) -> Sequence[Any]:
            outputs = compute(*args)
            tensors = [] if is_backward else [output for output in outputs if isinstance(output, Tensor)]
            log_sums.extend(tensor for tensor in tensors if tensor.shape == (1, *weights.shape[:2]))
            return outputs

        return run

    def options(*args: Any) -> dict[str, Any]:
        return kernel_options(*args) | case.options

    with compiled_for(card, make_graph), mock.patch.object(shared_prefix, "kernel_options", options):
        output = block_attention(**vars(call)).transpose(0, 1)
        gradients = torch.autograd.grad(output, inputs, weights)
    (in_bits,) = log_sums
    return {"output": output, "log-sum-exp": in_bits[0] * math.log(2), **dict(zip(INPUTS, gradients, strict=True))}


def plain_attention(inputs: Sequence[Tensor], weights: Tensor, case: Case) -> dict[str, Tensor]:
    """Return the same in float64."""
    query, key, value = inputs = [x.detach().double().requires_grad_() for x in inputs]
    key, value = (x.repeat_interleave(QUERY_HEADS // KEY_HEADS, dim=0) for x in (key, value))
    scores = query @ key.mT / math.sqrt(case.head_dim)
    scores = scores if case.softcap is None else case.softcap * (scores / case.softcap).tanh()
    scores = scores.masked_fill(~allowed_pairs(case), -torch.inf)
    output = scores.softmax(-1) @ value
    gradients = torch.autograd.grad(output, inputs, weights.double())
    return {"output": output, "log-sum-exp": scores.logsumexp(-1), **dict(zip(INPUTS, gradients, strict=True))}


def errors_of(case: Case) -> dict[str, float]:
    """Return the largest differences from plain attention."""
    torch.manual_seed(0)
    layout = layout_of(case.lengths)
    heads = {"query": QUERY_HEADS, "key": KEY_HEADS, "value": KEY_HEADS}
    row = layout.shape[-1], case.head_dim
    inputs = {name: torch.randn(count, *row, requires_grad=True) for name, count in heads.items()}
    call = Call(**inputs, mask=layout.block_mask(rule_of(case)), scale=case.head_dim**-0.5, softcap=case.softcap)
    weights = torch.randn(QUERY_HEADS, *row)
    found = attend(case.fault(call), weights, list(inputs.values()), case)
    expected = plain_attention(list(inputs.values()), weights, case)
    return {name: float((found[name] - expected[name]).detach().abs().max()) for name in expected}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({name: errors_of(CASES[name])}), flush=True)
