"""Rollouts on the device: the project's engine, and what a static cache and compilation bring to `model.generate`.

Prefill is a rollout of one token. A decode step is a rollout of many tokens less that, divided by the other tokens. The
engine samples from the trained weights, which are in float32 on a GPU too, under autocast. `model.generate` has a model
in bfloat16: under autocast its compiled step would cast all weights for every token.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.flops import Training, Workload
from benchmarks.gpu_parts.bench import Bench
from benchmarks.rollout import generate_inputs
from benchmarks.shapes import SHAPES
from benchmarks.sides import Setup, stock_model
from rl_vlm.model.policy import Policy
from rl_vlm.passes.recovery import free_memory, is_out_of_memory
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.types import RolloutRequest, Sampling

HEAD = ("completions", "way", "tokens_per_s", "prefill_share", "decode_step_ms", "max_num_seqs", "note")
NUM_GENERATIONS = 8
Rollout = Callable[[int], Any]
"""Samples so many tokens for each completion."""
GENERATE: dict[str, dict[str, Any]] = {
    "generate": {},
    "generate, static cache": {"cache_implementation": "static", "disable_compile": True},
    "generate, static cache, compiled": {"cache_implementation": "static"},
}
"""Ways of `model.generate`. With a static cache on a GPU, it compiles the decode step into CUDA graphs by default."""


ENGINE = "engine hf"
COMPILED = "generate, static cache, compiled"
SIZES = {8: (ENGINE, *GENERATE), 64: (ENGINE, *GENERATE), 256: (ENGINE, COMPILED)}
"""Ways for each number of completions."""
NUM_TOKENS = 128


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and number of completions."""
    work = Workload(24, 20, 10, 2) if bench.small else Workload(completion_tokens=NUM_TOKENS)
    sizes = {4: SIZES[8]} if bench.small else SIZES
    cases = {f"{way}, {number} completions": (way, number) for number, ways in sizes.items() for way in ways}
    with tempfile.TemporaryDirectory() as directory:
        setup = Setup.build(SHAPES["toy" if bench.small else "3b"], work, Training(), Path(directory), bench.device)
        policy, model = setup.policy().eval(), stock_model(setup, setup.dtype).eval()
        for way, completions in bench.in_time(cases):
            forget_compiled(model)
            if way == ENGINE:
                row = engine_row(bench, setup, policy, completions)
            else:
                run = generate_rollout(setup, model, completions, GENERATE[way])
                row = {"note": f"weights in {setup.dtype}"} | figures(bench, run, completions, work)
            yield {"completions": completions, "way": way} | row


def engine_row(bench: Bench, setup: Setup, policy: Policy, completions: int) -> dict[str, Any]:
    """Measure groups by the project's engine, which prefills each prompt once."""
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

    row = figures(bench, run, completions, setup.work)
    return row | {"max_num_seqs": engine.max_num_seqs}  # halved whenever memory ran out


def generate_rollout(setup: Setup, model: Any, completions: int, way: dict[str, Any]) -> Rollout:
    """Return the same by `model.generate`, which prefills each completion."""
    inputs = {name: values.to(model.device) for name, values in generate_inputs(setup.group.group.prompt).items()}
    sampling = {"do_sample": True, "top_k": 0, "num_return_sequences": completions, "eos_token_id": None}
    return lambda num_tokens: model.generate(**inputs, **sampling, **way, max_new_tokens=num_tokens)


def forget_compiled(model: Any) -> None:
    """Make the model's next rollout compile its step for its own number of completions, and free what the last left."""
    torch._dynamo.reset()
    for name in ("_compiled_call", "_cache"):
        model.__dict__.pop(name, None)
    free_memory()


def figures(bench: Bench, run: Rollout, completions: int, work: Workload) -> dict[str, Any]:
    """Measure rollouts of one token and of many, or find that the card has no room for them."""
    num_tokens = work.completion_tokens
    try:
        prefill, whole = (bench.median_seconds(lambda n=n: run(n), repeats=1) for n in (1, num_tokens))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"note": "out of memory"}
    return {
        "tokens_per_s": completions * num_tokens / whole,
        "prefill_share": prefill / whole,
        "decode_step_ms": 1e3 * (whole - prefill) / (num_tokens - 1),
    }
