"""The training pass at true shapes: a prompt of 1,000 image and 40 text tokens, in micro-batches that fill the card.

Shared and dense rows take the passes of `Trainer` over several groups, TRL and the floor over one. FLOPs are those of
the unique work without recomputation, so that the utilization of all sides is that of the same work. Kernels are summed
by their names, under the profiler, and divided by the time without it. The device is idle in what is left.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from torch.profiler import profile

from benchmarks.common import peak_bytes, version_of
from benchmarks.flops import Training, Workload, unique_flops
from benchmarks.gpu_parts.bench import Bench
from benchmarks.shapes import SHAPES, make_group, model_config
from benchmarks.sides import Setup, floor_side, trl_side
from benchmarks.training_phase import forward_backward, trainer_of
from rl_vlm.model import head
from rl_vlm.passes.recovery import free_memory, is_out_of_memory
from rl_vlm.trainer import Trainer
from rl_vlm.types import ScoredGroup

HEAD = (
    "model", "G", "completion", "side", "ms_per_group", "unique_tokens_per_s", "mfu", "mfu_from_language", "peak_gib",
    "micro_batch_tokens", "kernels", "note",
)  # fmt: skip
SMALL_WORK = Workload(image_tokens=24, text_tokens=20, completion_tokens=10, num_generations=3)
COMPARED = 800
"""Length of completions at which all sides are measured and kernels summed; at others shared rows alone."""
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


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    setup: Setup
    side: str
    """A side, or how this project lays out rows."""
    chunk: int | None = None
    """Logits that the LM head computes at once, if not its default."""
    is_profiled: bool = False

    @property
    def labels(self) -> dict[str, Any]:
        work = self.setup.work
        note = {} if self.chunk is None else {"note": f"LM head in chunks of {self.chunk / 2**20:.0f} Mi logits"}
        return {"G": work.num_generations, "completion": work.completion_tokens, "side": self.side} | note

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.labels.items())


def measure(bench: Bench, model: str, training: Training) -> Iterator[dict[str, Any]]:
    """Yield a row for each side of each group. Those of this project come first, and have one model."""
    works = [Workload(completion_tokens=n, num_generations=g) for n in (COMPARED, 200, 2000) for g in (8, 16)]
    works = [SMALL_WORK] if bench.small else works
    shape = SHAPES["toy" if bench.small else model]
    with tempfile.TemporaryDirectory() as directory:
        setup = Setup.build(shape, works[0], training, Path(directory), bench.device)
        setups = [replace(setup, work=work, group=make_group(setup.group.group.prompt, work)) for work in works]
        compared = [each for each in setups if each.work.completion_tokens == works[0].completion_tokens]
        own = [Case(each, "shared", is_profiled=each in compared) for each in setups]
        own += [Case(each, "dense") for each in compared]
        own += [Case(compared[0], "shared", elements) for elements in LARGER_CHUNKS]
        others = [Case(each, side) for each in compared for side in ("floor", *(["trl"] if version_of("trl") else []))]
        for row in chain(own_rows(bench, own), other_rows(bench, others)):
            yield {"model": model} | row


def own_rows(bench: Bench, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield the rows of one trainer."""
    trainer = make_trainer(cases[0].setup)
    for case in bench.in_time({str(case): case for case in cases}):
        with mock.patch.object(head, "HEAD_CHUNK_ELEMENTS", case.chunk or head.HEAD_CHUNK_ELEMENTS):
            yield case.labels | own_figures(bench, trainer, case)


def own_figures(bench: Bench, trainer: Trainer, case: Case) -> dict[str, Any]:
    """Measure the trainer's passes over several groups."""
    free_memory()
    trainer.passes.sharing = "dense" if case.side == "dense" else "shared"
    num_groups = 2 if bench.small else max(2, MOST_TOKENS // case.setup.work.unique_tokens)
    groups = [new_group(case.setup, seed) for seed in range(num_groups)]
    run = partial(accumulate, trainer, groups)
    row = figures(bench, case.setup, run, num_groups)
    row["micro_batch_tokens"] = trainer.passes.recovery.budget.tokens
    if case.is_profiled:
        row["kernels"] = kernel_shares(bench, run, row["ms_per_group"] * num_groups / 1e3)
    return row


def other_rows(bench: Bench, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the floor and of TRL, with gradient checkpointing where the card has no room without."""
    for case in bench.in_time({str(case): case for case in cases}):
        setup = case.setup
        ways: list[tuple[Setup, str | None]] = [(setup, None)]
        if not setup.training.gradient_checkpointing:
            recomputed = replace(setup, training=replace(setup.training, gradient_checkpointing=True))
            ways.append((recomputed, "with gradient checkpointing"))
        for tried, note in ways:
            free_memory()
            found = figures_of_other(bench, tried, case.side)
            if found is not None:
                yield case.labels | {"note": note} | found
                break
        else:
            yield case.labels | {"note": "out of memory"}


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
    forward_backward(trainer, groups)
    trainer.optimizer.strategy.clear_gradients()


def figures(bench: Bench, setup: Setup, run: Callable[[], Any], num_groups: int) -> dict[str, Any]:
    """Measure passes over groups, after one that finds what fits."""
    run()
    times: list[float] = []
    repeats = 1 if bench.small else 3
    peak = peak_bytes(lambda: times.extend(bench.seconds(run) for _ in range(repeats)), bench.device)
    seconds = median(times) / num_groups
    work = setup.work
    flops = unique_flops(model_config(setup.shape), work, setup.training)
    return {
        "ms_per_group": 1e3 * seconds,
        "unique_tokens_per_s": work.unique_tokens / seconds,
        "mfu": bench.utilization(flops.total, seconds),
        "mfu_from_language": bench.utilization(flops.language + flops.head, seconds),
        "peak_gib": peak / 2**30,
    }


def kernel_shares(bench: Bench, run: Callable[[], Any], seconds: float) -> str:
    """Return the share by kind of kernel of the seconds that passes take without the profiler."""
    with profile() as found:
        bench.seconds(run)
    times: Counter[str] = Counter()
    for event in found.events() or []:
        if event.device_type.name == bench.device.type.upper() and not event.is_user_annotation:
            times[kind_of(event.name)] += event.time_range.elapsed_us() if bench.on_gpu else event.self_cpu_time_total
    shares = {kind: time / 1e6 / seconds for kind, time in times.most_common()}
    shares["idle"] = max(0.0, 1 - sum(shares.values()))
    return ", ".join(f"{kind} {share:.2f}" for kind, share in shares.items())


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KERNELS.items() if re.search(names, kernel.lower())), "others")
