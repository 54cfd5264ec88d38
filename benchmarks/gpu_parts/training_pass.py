"""The training pass at true shapes: a prompt of 1,000 image and 40 text tokens, in micro-batches that fill the card.

Shared and dense rows take the passes of `Trainer` over several groups, TRL and the floor over one. FLOPs are those of
the unique work without recomputation, so that the utilization of all sides is that of the same work. Kernels are summed
by their names. The device is idle in what is left of the time.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch.profiler import profile

from benchmarks.common import peak_bytes, version_of
from benchmarks.flops import Training, Workload, unique_flops
from benchmarks.gpu_parts.bench import Bench
from benchmarks.shapes import SHAPES, make_group, model_config
from benchmarks.sides import Setup, floor_side, trl_side
from benchmarks.training_phase import trainer_of, window_of
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.memory.recovery import free_memory, is_out_of_memory
from rl_vlm.model import policy
from rl_vlm.trainer import Trainer
from rl_vlm.types import ScoredGroup, Sharing

HEAD = (
    "model", "G", "completion", "side", "ms_per_group", "unique_tokens_per_s", "mfu", "mfu_language", "peak_gib",
    "micro_batch_tokens", "kernels", "note",
)  # fmt: skip
TRAINING = {"3b": Training(), "7b": Training(lora_r=16)}
"""A tower is trained with the 3B model, and frozen with the 7B one. Nothing is recomputed."""
SMALL_WORK = Workload(image_tokens=24, text_tokens=20, completion_tokens=10, num_generations=3)
COMPARED = 800
"""Length of completions at which all sides are measured; at others shared rows alone."""
MOST_TOKENS = 2**15
"""Unique tokens of a pass, and the budget that is tried first. It is halved while the card has no room."""
LARGER_CHUNKS = (2**27, 2**28, 2**29)
"""Logits that the LM head computes at once, beside its default."""
KERNELS = {
    "attention": r"flex|flash|fmha|attention|scaled_dot_product",
    "matrix products": r"gemm|cutlass|cublas|nvjet|wgmma|::addmm|::mm|::bmm",
    "copies": r"memcpy|memset|copy",
}
"""Kinds of kernels, by what their names contain."""


def measure(bench: Bench, model: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each side of each group."""
    works = [Workload(completion_tokens=n, num_generations=g) for g in (8, 16) for n in (200, COMPARED, 2000)]
    shape = SHAPES["toy" if bench.small else model]
    for work in [SMALL_WORK] if bench.small else works:
        named = {"model": model, "G": work.num_generations, "completion": work.completion_tokens}
        with tempfile.TemporaryDirectory() as directory:
            setup = Setup.build(shape, work, TRAINING[model], Path(directory), bench.device)
            compares = bench.small or work.completion_tokens == COMPARED
            yield from (named | row for row in own_rows(bench, setup, ("shared", "dense") if compares else ("shared",)))
            if compares:
                yield from (named | row for row in larger_chunk_rows(bench, setup))
                yield from (named | row for row in other_rows(bench, setup))


def own_rows(bench: Bench, setup: Setup, sides: Sequence[Sharing]) -> Iterator[dict[str, Any]]:
    """Yield the rows of shared and dense rows, and where the time of shared rows goes."""
    free_memory()
    trainer = make_trainer(setup)
    groups = [new_group(setup, seed) for seed in range(max(2, MOST_TOKENS // setup.work.unique_tokens))]
    groups = groups[:2] if bench.small else groups
    for sharing in sides:
        trainer.sharing = sharing
        trainer.progress.micro_batch_tokens = MOST_TOKENS
        run = partial(accumulate, trainer, groups)
        row = {"side": sharing} | figures(bench, setup, run, len(groups))
        row["micro_batch_tokens"] = trainer.progress.micro_batch_tokens
        yield row | ({"kernels": kernel_shares(bench, run)} if sharing == "shared" else {})


def larger_chunk_rows(bench: Bench, setup: Setup) -> Iterator[dict[str, Any]]:
    """Yield the rows of shared rows whose LM head computes more logits at once."""
    for elements in LARGER_CHUNKS:
        with mock.patch.object(policy, "HEAD_CHUNK_ELEMENTS", elements):
            for row in own_rows(bench, setup, ("shared",)):
                yield row | {"note": f"LM head in chunks of {elements / 2**20:.0f} Mi logits"}


def other_rows(bench: Bench, setup: Setup) -> Iterator[dict[str, Any]]:
    """Yield the rows of the floor and of TRL, with gradient checkpointing where the card has no room without."""
    recomputed = replace(setup, training=replace(setup.training, gradient_checkpointing=True))
    for name in ("floor", *(["trl"] if version_of("trl") else [])):
        for tried, note in ((setup, None), (recomputed, "with gradient checkpointing")):
            free_memory()
            found = figures_of_other(bench, tried, name)
            if found is not None:
                yield {"side": name, "note": note} | found
                break
        else:
            yield {"side": name, "note": "out of memory"}


def figures_of_other(bench: Bench, setup: Setup, name: str) -> dict[str, Any] | None:
    """Measure the floor or TRL; return None if the card has no room."""
    try:
        side = floor_side(setup) if name == "floor" else trl_side(setup, setup.checkpoint / "trl")
        return figures(bench, setup, side.run, num_groups=1)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def make_trainer(setup: Setup) -> Trainer:
    """Build a trainer on the card, whose budget is not yet what fits."""
    config = setup.config
    config.memory.micro_batch_tokens = MOST_TOKENS
    return trainer_of(config, setup.policy())


def new_group(setup: Setup, seed: int) -> ScoredGroup:
    """Make another group of the same sizes, with a prompt of its own."""
    return make_group(replace(setup.group.group.prompt), setup.work, seed)


def accumulate(trainer: Trainer, groups: list[ScoredGroup]) -> None:
    """Run forward and backward over all groups, and drop the gradients."""
    trainer.start_step()
    trainer.accumulate_gradients(window_of(groups), groups, StepMetrics())
    trainer.optimizer.strategy.clear_gradients()


def figures(bench: Bench, setup: Setup, run: Callable[[], Any], num_groups: int) -> dict[str, Any]:
    """Measure passes over groups."""
    seconds = bench.median_seconds(run, repeats=3) / num_groups
    work = setup.work
    flops = unique_flops(model_config(setup.shape), work, setup.training)
    return {
        "ms_per_group": 1e3 * seconds,
        "unique_tokens_per_s": work.unique_tokens / seconds,
        "mfu": bench.utilization(flops.total, seconds),
        "mfu_language": bench.utilization(flops.language + flops.head, seconds),
        "peak_gib": peak_bytes(run, bench.device) / 2**30,
    }


def kernel_shares(bench: Bench, run: Callable[[], Any]) -> str:
    """Return the share of the time by kind of kernel."""
    with profile() as found:
        seconds = bench.seconds(run)
    times: Counter[str] = Counter()
    for event in found.events() or []:
        if event.device_type.name == bench.device.type.upper():
            times[kind_of(event.name)] += event.time_range.elapsed_us() if bench.on_gpu else event.self_cpu_time_total
    shares = {kind: time / 1e6 / seconds for kind, time in times.most_common()}
    shares["idle"] = 1 - sum(shares.values())
    return ", ".join(f"{kind} {share:.2f}" for kind, share in shares.items())


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KERNELS.items() if re.search(names, kernel.lower())), "others")
