"""Decode steps of the engine `hf` against their floor, the matrix products of a step.

The floor has the products of all linear layers and of the LM head, and those of attention with one copy of each
prompt's keys. Both sides take turns. Seconds are CPU time of this thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import markdown_table, peak_growth
from benchmarks.flops import Training, Workload
from benchmarks.shapes import SHAPES
from benchmarks.sides import Setup
from rl_vlm.model.families import head_dim
from rl_vlm.model.group_cache import group_layers
from rl_vlm.rollout.hf import HFEngine, Prefix, generation_mode

BATCHES = ((1, 8), (1, 64), (4, 16), (1, 256))
"""Prompts, and completions of each."""


@dataclass
class Decoding:
    """Steps of an engine, after the prefill of its prompts."""

    engine: HFEngine
    prefix: Prefix
    owners: list[int]
    num_tokens: int

    @torch.no_grad()
    def run(self) -> None:
        """Decode all tokens of all completions."""
        with generation_mode(self.engine.model):
            grouped = group_layers(self.prefix.cache, self.engine.model.config)
            expanded = self.prefix.expand(self.owners, grouped)
            tokens = torch.full((len(self.owners), 1), 40)
            for step in range(self.num_tokens):
                self.engine.forward(expanded, tokens, step)


def floor(decoding: Decoding, prompt_tokens: int) -> Callable[[], None]:
    """Return a function that computes the products of all steps. Keys of completions have their mean length."""
    model: Any = decoding.engine.model
    text = model.config.get_text_config()
    weights = [module.weight for module in model.get_decoder().modules() if isinstance(module, nn.Linear)]
    weights.append(model.get_output_embeddings().weight)
    num, prompts, length = len(decoding.owners), max(decoding.owners) + 1, decoding.num_tokens // 2
    inputs = {weight.shape[1]: torch.randn(num, weight.shape[1]) for weight in weights}
    kv_heads, heads = text.num_key_value_heads, text.num_attention_heads // text.num_key_value_heads
    parts = [(prompts * kv_heads, num // prompts * heads, prompt_tokens), (num * kv_heads, heads, length)]
    tensors: list[tuple[Tensor, Tensor]] = [
        (torch.randn(blocks, queries, head_dim(text)), torch.randn(blocks, keys, head_dim(text)))
        for blocks, queries, keys in parts
    ]

    @torch.no_grad()
    def run() -> None:
        for _ in range(decoding.num_tokens):
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)
            for query, key in tensors * text.num_hidden_layers:
                torch.matmul(query @ key.mT, key)

    return run


def cpu_seconds(run: Callable[[], None]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def decode_row(shape: str, prompts: int, completions: int, work: Workload, repeats: int) -> list[str]:
    """Measure one batch, and return its line of the table."""
    with tempfile.TemporaryDirectory() as directory:
        setup = Setup.build(SHAPES[shape], work, Training(), Path(directory))
        engine = HFEngine(setup.policy().eval().vision, None, [], prompts * completions)
        with torch.no_grad(), generation_mode(engine.model):
            prefix = engine.prefill([setup.new_group().group.prompt for _ in range(prompts)])
        owners = [prompt for prompt in range(prompts) for _ in range(completions)]
        decoding = Decoding(engine, prefix, owners, work.completion_tokens)
        products = floor(decoding, work.prompt_tokens)
        growth = peak_growth(decoding.run)
        pairs = [(cpu_seconds(decoding.run), cpu_seconds(products)) for _ in range(repeats)]
    steps, floors = ([1e3 * seconds / work.completion_tokens for seconds in side] for side in zip(*pairs, strict=True))
    return [
        f"{prompts} x {completions}", f"{work.prompt_tokens:,}", f"{median(steps):.1f}",
        f"{median(steps) / len(owners):.2f}", f"{median(floors):.1f}",
        f"{median(least / step for step, least in zip(steps, floors, strict=True)):.2f}", f"{growth / 2**20:.0f}",
    ]  # fmt: skip


def decode_table(shape: str, image_tokens: int, completion_tokens: int, repeats: int) -> str:
    """Measure all batches on one thread."""
    torch.set_num_threads(1)
    work = Workload(image_tokens, 40, completion_tokens, 1)
    rows = [decode_row(shape, *batch, work, repeats) for batch in BATCHES]
    return markdown_table(
        ["prompts x completions", "prompt tokens", "ms a step", "ms a token", "floor, ms", "floor / step", "MiB"], rows
    )
