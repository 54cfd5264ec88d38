"""Parts of a step by themselves: a decoder layer, the LM head and the vision tower, with and without their speed-ups.

Times are of forward and backward, at the shapes of Qwen2.5-VL-3B: a row of 7,440 tokens for the layer, 6,400 tokens for
the head, an image of 1,000 tokens for the tower. `host_ms` is the time until the host has launched all work. If it is
as long as the whole, the part waits for the host.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.flops import Training, Workload
from benchmarks.gpu_parts.bench import Bench
from benchmarks.shapes import SHAPES, Shape
from benchmarks.sides import Setup, give_adapters_weights
from rl_vlm.model import head
from rl_vlm.model.fused import compile_layers
from rl_vlm.model.policy import Policy
from rl_vlm.passes.recovery import free_memory

HEAD = ("part", "way", "ms", "host_ms", "note")
WORK, SMALL_WORK = Workload(completion_tokens=800), Workload(24, 20, 10, 3)
TRAININGS = {
    "full": Training(),
    "full, checkpointing": Training(gradient_checkpointing=True),
    "LoRA": Training(lora_r=32),
    "LoRA, checkpointing": Training(gradient_checkpointing=True, lora_r=32),
}
CHUNKS = (2**26, 2**28)
"""Logits that the LM head computes at once."""


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for each part and way."""
    parts = {f"decoder layer, {name}": (layer_rows, training) for name, training in TRAININGS.items()}
    parts |= {"LM head": (head_rows, Training()), "vision tower": (tower_rows, Training())}
    for name in bench.in_time({name: name for name in parts}):
        rows_of, training = parts[name]
        free_memory()
        with tempfile.TemporaryDirectory() as directory:
            setup = one_layer(bench, training, Path(directory))
            policy = setup.policy()
            give_adapters_weights(policy)
            yield from ({"part": name} | row for row in rows_of(bench, policy, setup))


def one_layer(bench: Bench, training: Training, directory: Path) -> Setup:
    """Describe a model with one decoder layer, and with the whole tower and head."""
    language, vision = SHAPES["toy" if bench.small else "3b"]
    shape: Shape = (language | {"num_hidden_layers": 1}, vision)
    return Setup.build(shape, SMALL_WORK if bench.small else WORK, training, directory, bench.device)


def layer_rows(bench: Bench, policy: Policy, setup: Setup) -> Iterator[dict[str, Any]]:
    """Measure a decoder layer over a row of all unique tokens, with causal attention by SDPA."""
    language: Any = policy.transformer.get_decoder()
    layer, width = language.layers[0], language.config.hidden_size
    tokens = setup.work.unique_tokens
    row = torch.randn(1, tokens, width, device=bench.device, requires_grad=True)
    positions = torch.arange(tokens, device=bench.device).expand(3, 1, -1)

    def run() -> None:
        with policy.autocast(keeps_casts=False):
            angles = language.rotary_emb(row, positions)
            output = layer(row, attention_mask=None, position_ids=positions, position_embeddings=angles)
        output.backward(torch.ones_like(output))
        clear(policy)

    yield {"way": "not fused"} | figures(bench, run)
    compile_layers(policy)
    yield {"way": "fused"} | figures(bench, run)


def head_rows(bench: Bench, policy: Policy, setup: Setup) -> Iterator[dict[str, Any]]:
    """Measure log-probs of all completions' tokens."""
    tokens = setup.work.num_generations * setup.work.completion_tokens
    width = policy.transformer.config.get_text_config().hidden_size
    hidden = torch.randn(tokens, width, device=bench.device, requires_grad=True)
    targets = torch.randint(100, (tokens,), device=bench.device)
    for elements in CHUNKS:
        for fused in (False, True):

            def run() -> None:
                policy.logprobs(hidden, targets)[0].sum().backward()
                clear(policy)

            with mock.patch.object(head, "HEAD_CHUNK_ELEMENTS", elements), mock.patch.object(policy, "fused", fused):
                note = f"chunks of {elements / 2**20:.0f} Mi logits"
                yield {"way": "fused" if fused else "not fused", "note": note} | figures(bench, run)


def tower_rows(bench: Bench, policy: Policy, setup: Setup) -> Iterator[dict[str, Any]]:
    """Measure the vision tower on one image, with its windows in batches and one by one."""

    def run() -> None:
        prompt = replace(setup.group.group.prompt)
        with policy.autocast(keeps_casts=False):
            policy.vision.run([prompt])[prompt].embeddings.sum().backward()
        clear(policy)

    yield {"way": "windows in batches"} | figures(bench, run)
    policy.transformer.set_attn_implementation({"vision_config": "sdpa"})
    yield {"way": "windows one by one"} | figures(bench, run)


def clear(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def figures(bench: Bench, run: Callable[[], None]) -> dict[str, float]:
    """Measure a part, and how long the host takes to launch its work."""
    seconds = bench.median_seconds(run)
    start = time.perf_counter()
    run()
    launched = time.perf_counter() - start
    bench.synchronize()
    return {"ms": 1e3 * seconds, "host_ms": 1e3 * launched}
