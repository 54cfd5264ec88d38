"""Shared memory, registers and stack of FlexAttention's kernels on cards that are not there, by Triton's own ptxas.

    python benchmarks/compiled_kernels.py                        print the table of docs/benchmarks.md, in half an hour
    python benchmarks/compiled_kernels.py --docs                 put it there
    python benchmarks/compiled_kernels.py --docs --cards 4090    measure a card again, and keep the others

The kernels are those of `block_attention` over a packed row, forward and backward, with PyTorch's tiles and with the
options of `kernel_options`. If a kernel does not fit, PyTorch compiles it again in one stage, and so does this script.
Each card has its own process, since torch and Triton remember the first card that they find.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.codecache import PyCodeCache
from torch.fx import GraphModule
from transformers.masking_utils import causal_mask_function
from triton import knobs

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.absent_card import CARDS, Card, standing_in
from benchmarks.common import in_fresh_process, markdown_table, version_of
from benchmarks.cuda_source import compiled_for, kernels_of
from benchmarks.report import PAGE, RESULTS, fill
from rl_vlm.model import shared_prefix
from rl_vlm.model.flex_kernels import ALWAYS, kernel_options
from rl_vlm.model.shared_prefix import RowLayout, block_attention

KINDS = ("forward", "backward")
HEAD_DIMS = (64, 128, 256, 512)
QUERY_HEADS, KEY_HEADS = 8, 2
CAUSAL: Any = causal_mask_function
RESULT = RESULTS / "kernels.json"
CARDS_OF_VARIANTS = ("a100", "4090")
"""Cards for which attention with a soft cap, as in PaliGemma 2, and in float32 is compiled too."""


@dataclass(frozen=True)
class Cell:
    """A card and the attention of a model."""

    card: str
    head_dim: int
    dtype: str = "bfloat16"
    softcap: float | None = None
    has_own_tiles: bool = True
    """Whether the options are those of `kernel_options`. Otherwise PyTorch chooses the tiles."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel."""

    shared_memory: int
    """Bytes per block."""
    registers: int
    stack: int
    """Bytes of local memory per thread, where registers are spilled."""
    warps: int
    stages: int
    first_shared_memory: int
    """Bytes per block before it was compiled again in one stage, or the same."""

    def text(self, card: Card) -> str:
        """Return the figures for a cell of the table."""
        shared = f"{self.shared_memory:,}"
        if self.shared_memory != self.first_shared_memory:
            shared = f"{self.first_shared_memory:,} and then {shared}"
        if self.shared_memory > card.shared_memory:
            shared = f"**{shared}: does not fit**"
        return f"{shared}; {self.registers}; {self.stack:,}"


def measure_apart(cells: Sequence[Cell]) -> dict[Cell, dict[str, Kernel]]:
    """Return `measure` of some cells of one card, in a fresh process."""
    found = in_fresh_process("compiled_kernels.py", ["--measure", json.dumps([asdict(cell) for cell in cells])])
    return dict(zip(cells, map(read, found), strict=True))


def measure(cell: Cell) -> dict[str, Kernel]:
    """Compile the forward and the backward kernel of a cell."""
    card = CARDS[cell.card]
    sources: dict[str, str] = {}

    def keep(graph: GraphModule, source: str, is_backward: bool) -> Callable[..., Any]:
        sources[KINDS[is_backward]] = source
        return graph

    with ExitStack() as patches:
        if not cell.has_own_tiles:
            patches.enter_context(mock.patch.object(shared_prefix, "kernel_options", lambda *args: ALWAYS))
        patches.enter_context(compiled_for(card, keep))
        attend(cell).sum().backward()
    return {name: compile_attention(source, card) for name, source in sources.items()}


def attend(cell: Cell) -> Tensor:
    """Compute attention over a small row. Kernels are compiled for all lengths."""
    layout = RowLayout.build([100, 40], [[60, 7], [90]])
    query, key, value = (
        torch.randn(heads, layout.shape[-1], cell.head_dim, dtype=getattr(torch, cell.dtype), requires_grad=True)
        for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    )
    return block_attention(query, key, value, layout.block_mask(CAUSAL), cell.head_dim**-0.5, cell.softcap)


def compile_attention(source: str, card: Card) -> Kernel:
    """Compile the kernel of attention in a lowered graph as PyTorch would."""
    (name,) = (name for name in kernels_of(source) if name.startswith("triton_tem"))  # of a template
    tuner = getattr(PyCodeCache.load(kernels_of(source)[name]), name)
    (config,) = tuner.configs
    with standing_in(card), inductor.patch(use_static_triton_launcher=False):
        compiled = first = tuner._precompile_config(config).kernel
        if first.metadata.shared > card.shared_memory:
            in_one_stage = copy.copy(config)
            in_one_stage.num_stages = 1
            compiled = tuner._precompile_config(in_one_stage).kernel
    registers, stack = resources(compiled.asm["cubin"])
    return Kernel(
        compiled.metadata.shared, registers, stack, compiled.metadata.num_warps, compiled.metadata.num_stages,
        first.metadata.shared,
    )  # fmt: skip


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack per thread of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return int(registers), int(stack)


def cells(card: str) -> Iterator[Cell]:
    """Yield the cells of a card in the table. If `kernel_options` leaves the tiles to PyTorch, one cell is both."""
    attentions = [Cell(card, head_dim) for head_dim in HEAD_DIMS]
    if card in CARDS_OF_VARIANTS:
        attentions += [Cell(card, 256, softcap=50.0), Cell(card, 128, dtype="float32")]
    for cell in attentions:
        if kernel_options(cell.head_dim, CARDS[card].shared_memory, getattr(torch, cell.dtype)) != ALWAYS:
            yield replace(cell, has_own_tiles=False)
        yield cell


def table(measured: dict[Cell, dict[str, Kernel]]) -> str:
    def tiles_of(cell: Cell) -> str:
        if not cell.has_own_tiles:
            return "PyTorch's"
        return "ours" if replace(cell, has_own_tiles=False) in measured else "both"

    head = ["card", "heads", "tiles", *(f"{kind}: shared memory; registers; stack" for kind in KINDS)]
    rows = [
        [
            CARDS[cell.card].name,
            f"{cell.head_dim}, {cell.dtype}" + (", soft cap" if cell.softcap else ""),
            tiles_of(cell),
            *(kernels[kind].text(CARDS[cell.card]) for kind in KINDS),
        ]
        for cell, kernels in measured.items()
    ]
    return markdown_table(head, rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--docs", action="store_true", help="put the table in docs/benchmarks.md")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.measure:
        print(json.dumps([written(measure(Cell(**cell))) for cell in args.measure]))
        return
    measured: dict[Cell, dict[str, Kernel]] = {}
    for card in args.cards:
        measured |= measure_apart(list(cells(card)))
        if args.docs:
            keep(measured)
    print(table(measured))


def keep(measured: dict[Cell, dict[str, Kernel]]) -> None:
    """Add cells to docs/benchmarks/kernels.json, and put the table of its cells in docs/benchmarks.md."""
    found = (kept() if RESULT.exists() else {}) | measured
    ordered = {cell: found[cell] for card in CARDS for cell in cells(card) if cell in found}
    result = {
        "benchmark": "kernels",
        "cells": [asdict(cell) | written(kernels) for cell, kernels in ordered.items()],
        "versions": {name: version_of(name) for name in ("torch", "triton")},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    PAGE.write_text(fill(PAGE.read_text(), "kernels", f"{table(ordered)}\n\nCompiled with {versions}."))


def kept() -> dict[Cell, dict[str, Kernel]]:
    """Return the cells of docs/benchmarks/kernels.json."""
    found = json.loads(RESULT.read_text())["cells"]
    return {
        Cell(**{key: value for key, value in each.items() if key not in KINDS}): read({k: each[k] for k in KINDS})
        for each in found
    }


def written(kernels: dict[str, Kernel]) -> dict[str, dict[str, int]]:
    return {name: asdict(kernel) for name, kernel in kernels.items()}


def read(kernels: dict[str, dict[str, int]]) -> dict[str, Kernel]:
    return {name: Kernel(**figures) for name, figures in kernels.items()}


if __name__ == "__main__":
    main()
