"""Rollouts on the device: the project's engine, and what a static cache and compilation bring to `model.generate`.

Prefill is a rollout of one token. A decode step is a rollout of many tokens less that, divided by the other tokens.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.flops import Training, Workload
from benchmarks.gpu_parts.bench import Bench
from benchmarks.rollout import generate_inputs
from benchmarks.shapes import SHAPES
from benchmarks.sides import Setup
from rl_vlm.model.policy import Policy
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.types import RolloutRequest, Sampling

HEAD = ("completions", "way", "tokens_per_s", "prefill_share", "decode_step_ms")
NUM_GENERATIONS = 8
Rollout = Callable[[int], Any]
"""Samples so many tokens for each completion."""
GENERATE: dict[str, dict[str, Any]] = {
    "generate": {},
    "generate, static cache": {"cache_implementation": "static", "disable_compile": True},
    "generate, static cache, compiled": {"cache_implementation": "static"},
}
"""Ways of `model.generate`. With a static cache on a GPU, it compiles the decode step into CUDA graphs by default."""


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and number of completions."""
    work = Workload(24, 20, 10, 2) if bench.small else Workload(completion_tokens=256)
    with tempfile.TemporaryDirectory() as directory:
        setup = Setup.build(SHAPES["toy" if bench.small else "3b"], work, Training(), Path(directory), bench.device)
        policy = setup.policy().eval()
        for completions in (4,) if bench.small else (8, 64, 256):
            ways = {"engine hf": engine_rollout(setup, policy, completions)}
            ways |= {name: generate_rollout(setup, policy, completions, way) for name, way in GENERATE.items()}
            for name, run in ways.items():
                yield {"completions": completions, "way": name} | figures(bench, run, completions, work)


def engine_rollout(setup: Setup, policy: Policy, completions: int) -> Rollout:
    """Return the rollout of groups by the project's engine, which prefills each prompt once."""
    engine = HFEngine.for_policy(policy, AutoTokenizer.from_pretrained(setup.checkpoint), max_num_seqs=completions)
    engine.stop_token_ids = []
    num_generations = min(NUM_GENERATIONS, completions)

    def run(num_tokens: int) -> None:
        policy.start_step()
        requests = [
            RolloutRequest(str(i), dataclasses.replace(setup.group.group.prompt))
            for i in range(completions // num_generations)
        ]
        engine.generate(requests, Sampling(num_generations, num_tokens, temperature=1.0, seed=0))

    return run


def generate_rollout(setup: Setup, policy: Policy, completions: int, way: dict[str, Any]) -> Rollout:
    """Return the same by `model.generate`, which prefills each completion."""
    model: Any = policy.transformer
    inputs = {name: values.to(setup.device) for name, values in generate_inputs(setup.group.group.prompt).items()}
    sampling = {"do_sample": True, "top_k": 0, "num_return_sequences": completions, "eos_token_id": None}

    def run(num_tokens: int) -> None:
        with policy.autocast():
            model.generate(**inputs, **sampling, **way, max_new_tokens=num_tokens)

    return run


def figures(bench: Bench, run: Rollout, completions: int, work: Workload) -> dict[str, Any]:
    """Measure rollouts of one token and of many."""
    num_tokens = work.completion_tokens
    prefill, whole = (bench.median_seconds(lambda n=n: run(n), repeats=3) for n in (1, num_tokens))
    return {
        "tokens_per_s": completions * num_tokens / whole,
        "prefill_share": prefill / whole,
        "decode_step_ms": 1e3 * (whole - prefill) / (num_tokens - 1),
    }
