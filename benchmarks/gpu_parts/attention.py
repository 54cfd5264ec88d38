"""The attention of the packed row, alone: FlashAttention, FlexAttention, SDPA in two calls, and flash-attn's kernel.

Heads are those of the models. A row holds prompts of 1,040 tokens with 8 completions each. FlexAttention is compiled at
its first call for these heads; later rows of other lengths must not compile it again. Its block mask is made in strips,
without a compiler. The table has the registers, spills and shared memory of its kernels as Triton tells them. The last
is `flash_attn_varlen_func`, if flash-attn is installed: each completion attends to a copy of its prompt's keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from transformers.masking_utils import causal_mask_function

from benchmarks.common import version_of
from benchmarks.gpu_parts.bench import Bench
from rl_vlm.errors import shorten
from rl_vlm.model.flash_rows import FlashRow, has_flash
from rl_vlm.model.flex_kernels import compiled_flex_attention
from rl_vlm.model.shared_prefix import RowLayout, block_attention, shared_attention

HEAD = (
    "heads", "row", "way", "forward_ms", "forward_backward_ms", "mask_ms", "first_call_s", "compilations", "kernels",
    "note",
)  # fmt: skip
HEADS = {
    "3b": (16, 2, 128), "7b": (28, 4, 128), "gemma_4b": (8, 4, 256), "qwen3_5": (8, 2, 256), "toy": (4, 2, 16),
}  # fmt: skip
"""Query heads, key heads, and the width of a head: Qwen2.5-VL-3B and 7B, Gemma 3 4B, Qwen3.5 and MiniCPM-V 4.6."""
CAUSAL: Any = causal_mask_function
PROMPT = 1040
COMPLETIONS = 8
NUM_ROWS = 50
"""Rows of random lengths, for the compilations."""


@dataclass(frozen=True)
class Row:
    """A packed row with random queries, keys and values, each (heads, row, dim)."""

    lengths: Sequence[tuple[int, Sequence[int]]]
    """Tokens of each prompt and of its completions."""
    layout: RowLayout
    query: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def make(bench: Bench, heads: tuple[int, int, int], lengths: Sequence[tuple[int, Sequence[int]]]) -> Row:
        num_query, num_key, dim = heads
        prompts, completions = zip(*lengths, strict=True)
        layout = RowLayout.build(prompts, completions, bench.device)
        tokens = sum(prompts) + sum(map(sum, completions))
        dtype = getattr(torch, bench.dtype)
        query, key, value = (
            torch.randn(count, tokens, dim, dtype=dtype, device=bench.device, requires_grad=bench.on_gpu)
            for count in (num_query, num_key, num_key)
        )
        return Row(lengths, layout, query, key, value)

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row of the table for each way, number of heads and length of completions."""
    names = ["toy"] if bench.small else [name for name in HEADS if name != "toy"]
    for name in bench.in_time({f"heads of {name}": name for name in names}):
        forget_compiled()
        yield from ({"heads": name} | row for row in rows_of(bench, HEADS[name]))
    for name in bench.in_time({f"random lengths, heads of {name}": name for name in names[:1]}):
        forget_compiled()
        rows = f"FlexAttention, {NUM_ROWS} rows of random lengths, with and without gradients"
        yield {"heads": name, "way": rows} | compilations(bench, HEADS[name])


def rows_of(bench: Bench, heads: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of one number of heads. FlexAttention is compiled in its first."""
    sizes = [(20, 10, 2)] if bench.small else [(PROMPT, 200, 6), (PROMPT, 800, 4)]
    for size, (prompt, completion, prompts) in enumerate(sizes):
        row = Row.make(bench, heads, [(prompt, [completion] * COMPLETIONS)] * prompts)
        for way, build in ways(bench, row).items():
            found: dict[str, Any] = {"row": row.query.shape[1], "way": way}
            is_first = size == 0 and way == "FlexAttention"
            try:
                if is_first:
                    found["first_call_s"] = bench.seconds(build())
                found |= figures(bench, row, build)
            except RuntimeError as error:  # no kernel for these heads fits the card
                found["note"] = shorten(error)
            yield found | ({"kernels": kernels()} if is_first else {})


def forget_compiled() -> None:
    """Make the next call of FlexAttention compile it."""
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    compiled_flex_attention.cache_clear()


def kernels() -> str | None:
    """Describe the Triton kernels of what is compiled; None if there are none, as on CPUs.

    A spilled register costs traffic to local memory in every thread.
    """
    launchers = [
        launcher
        for module in PyCodeCache.modules
        for kernel in vars(module).values()
        if isinstance(kernel, CachingAutotuner)
        for launcher in kernel.launchers
    ]
    found = [
        f"{launcher.n_regs} registers, {launcher.n_spills} spilled, {launcher.shared} bytes shared"
        for launcher in launchers
    ]
    return "; ".join(dict.fromkeys(found)) or None


Attend = Callable[[], Tensor]
"""Attention over a row."""


def ways(bench: Bench, row: Row) -> dict[str, Callable[[], Attend]]:
    """Return the functions that build each way's masks and return its attention."""

    def flex() -> Attend:
        mask = row.layout.block_mask(CAUSAL)
        return lambda: block_attention(row.query, row.key, row.value, mask, row.scale, softcap=None)

    def sdpa() -> Attend:
        layout = replace(row.layout, masks=row.layout.dense_masks(CAUSAL))
        return lambda: shared_attention(row.query, row.key, row.value, layout, row.scale)

    def flash() -> Attend:
        layout = replace(row.layout, masks=FlashRow.build(row.layout.sections, bench.device))
        return lambda: shared_attention(row.query, row.key, row.value, layout, row.scale)

    found = {"FlexAttention": flex, "SDPA in two calls": sdpa}
    if has_flash(bench.device):
        found["FlashAttention"] = flash
    return found | ({"flash-attn, varied lengths": lambda: varied_lengths(row)} if version_of("flash-attn") else {})


def varied_lengths(row: Row) -> Attend:
    """Return attention by one call of flash-attn's kernel, in which each completion has a copy of its prompt's keys."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    sequences = list(key_places(row.lengths))
    device = row.query.device
    keys = torch.cat([places for _, places in sequences]).to(device)
    query_starts, key_starts = (
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        for counts in ([count for count, _ in sequences], [len(places) for _, places in sequences])
    )
    longest = max(count for count, _ in sequences), max(len(places) for _, places in sequences)

    def attend() -> Tensor:
        query, key, value = (x.transpose(0, 1) for x in (row.query, row.key, row.value))
        return flash_attn_varlen_func(
            query, key[keys], value[keys], query_starts, key_starts, *longest, softmax_scale=row.scale, causal=True
        )

    return attend


def key_places(lengths: Sequence[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of queries of each prompt and completion of a row, and the places of its keys."""
    end = 0
    for prompt, completions in lengths:
        prefix = torch.arange(end, end + prompt)
        end += prompt
        yield prompt, prefix
        for completion in completions:
            yield completion, torch.cat([prefix, torch.arange(end, end + completion)])
            end += completion


def figures(bench: Bench, row: Row, build: Callable[[], Attend]) -> dict[str, Any]:
    """Measure one way. On CPUs FlexAttention has no backward."""
    attend = build()
    found = {"mask_ms": 1e3 * bench.median_seconds(build)}
    with torch.no_grad():
        found["forward_ms"] = 1e3 * bench.median_seconds(attend)
    output = attend()
    if not output.requires_grad:
        return found
    gradient = torch.randn_like(output)
    inputs = (row.query, row.key, row.value)
    seconds = bench.median_seconds(lambda: torch.autograd.grad(attend(), inputs, gradient))
    return found | {"forward_backward_ms": 1e3 * seconds}


def compilations(bench: Bench, heads: tuple[int, int, int]) -> dict[str, Any]:
    """Count what is compiled while FlexAttention takes rows of other lengths, after one such row.

    Rows below 128 tokens, and rows without gradients, are graphs of their own. The limit on their number is that of
    runs; if it is reached, the note says so.
    """
    draw = random.Random(0)

    def run() -> None:
        longest = 20 if bench.small or draw.random() < 0.2 else 800
        lengths = [(draw.randint(4, longest), [draw.randint(1, longest) for _ in range(4)]) for _ in range(2)]
        row = Row.make(bench, heads, lengths)
        with torch.set_grad_enabled(draw.random() < 0.5):
            block_attention(row.query, row.key, row.value, row.layout.block_mask(CAUSAL), row.scale, softcap=None)

    first = bench.seconds(run)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    num_rows, found = 2 if bench.small else NUM_ROWS, {}
    try:
        found["forward_ms"] = 1e3 * bench.seconds(lambda: [run() for _ in range(num_rows)]) / num_rows
    except FailOnRecompileLimitHit:
        found["note"] = "the limit on recompilations was reached"
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    return {"first_call_s": first, "compilations": compiled} | found
