"""Peak memory of forward and backward passes against the budget, the memory plan and the allocator's fragmentation.

Completions have random lengths, so that micro-batches are not all alike. What the allocator has reserved beyond what
tensors held at their peak is fragmentation.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import peak_bytes
from benchmarks.flops import Training, Workload
from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.training_pass import accumulate
from benchmarks.shapes import SHAPES, make_group
from benchmarks.sides import Setup
from benchmarks.training_phase import trainer_of
from rl_vlm.distributed.shardings import UNSHARDED
from rl_vlm.passes.allocator import VARIABLES
from rl_vlm.passes.recovery import free_memory
from rl_vlm.plan.auto import this_card
from rl_vlm.plan.build import Model, plan_memory, read_config, traced_model
from rl_vlm.plan.hardware import Hardware
from rl_vlm.trainer import Trainer
from rl_vlm.types import ScoredGroup

HEAD = ("budget", "peak_gib", "planned_gib", "error", "reserved_gib", "fragmentation", "largest_budget", "allocator")
BUDGETS = (4096, 8192, 16384, 32768, 65536, 131072)


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for each budget, up to the first that does not fit. That row is of the largest budget that does."""
    allocator = os.environ.get(VARIABLES[0]) if bench.on_gpu else None
    shape, budgets = (SHAPES["toy"], (128, 256)) if bench.small else (SHAPES["3b"], BUDGETS)
    work = Workload(24, 20, 16, 2) if bench.small else Workload(completion_tokens=800)
    with tempfile.TemporaryDirectory() as directory:
        training = Training(gradient_checkpointing=True)
        setup = Setup.build(shape, work, training, Path(directory), bench.device)
        config = setup.config
        config.memory.micro_batch_tokens = budgets[0]
        found = read_config(config, directory)
        model = traced_model(config, directory, found, setup.group.group.prompt, bench.on_gpu)
        trainer = trainer_of(config, setup.policy(), model.activations.patch_price)  # as runs with a plan have it
        for budget in bench.in_time({f"a budget of {budget}": budget for budget in budgets}):
            row = figures(bench, setup, trainer, model, budget) | {"allocator": allocator}
            yield row
            if row["largest_budget"] is not None:
                return


def figures(bench: Bench, setup: Setup, trainer: Trainer, model: Model, budget: int) -> dict[str, Any]:
    """Measure passes over groups of twice the budget."""
    free_memory()
    groups = random_groups(setup, 2 * budget)
    fitting = lowered(trainer, groups, budget)  # warms up as well
    if fitting < budget:
        fitting = largest_fitting(trainer, groups, fitting, budget)
    peak = peak_bytes(lambda: accumulate(trainer, groups), bench.device)
    reserved = torch.cuda.max_memory_reserved(bench.device) if bench.on_gpu else None
    config = trainer.config.model_copy(deep=True)
    config.memory.micro_batch_tokens = fitting
    plan = plan_memory(config, Hardware(this_card(bench.device), 1, 1, UNSHARDED), model)
    planned = plan.training.total - plan.held["optimizer state"]  # of which this part makes none
    return {
        "budget": budget,
        "peak_gib": peak / 2**30,
        "planned_gib": planned / 2**30,
        "error": planned / peak - 1 if bench.on_gpu else None,
        "reserved_gib": reserved / 2**30 if reserved else None,
        "fragmentation": 1 - peak / reserved if reserved else None,
        "largest_budget": fitting if fitting < budget else None,
    }


def lowered(trainer: Trainer, groups: list[ScoredGroup], budget: int) -> int:
    """Run passes under this budget, and return what it is lowered to: itself if it fits."""
    set_budget(trainer, budget)
    accumulate(trainer, groups)
    return trainer.passes.recovery.budget.tokens


def set_budget(trainer: Trainer, tokens: int) -> None:
    """Set the token budget of the passes."""
    budget = trainer.passes.recovery.budget
    budget.load_state_dict(budget.state_dict() | {"tokens": tokens})


def largest_fitting(trainer: Trainer, groups: list[ScoredGroup], fitting: int, failing: int) -> int:
    """Return the largest budget that fits, to an eighth of the gap between one that does and one that does not."""
    for _ in range(3):
        middle = (fitting + failing) // 2
        if lowered(trainer, groups, middle) == middle:
            fitting = middle
        else:
            failing = middle
    set_budget(trainer, fitting)
    return fitting


def random_groups(setup: Setup, tokens: int) -> list[ScoredGroup]:
    """Make groups whose completions have random lengths, of so many unique tokens in all."""
    draw, groups, made = random.Random(0), [], 0
    while made < tokens:
        length = draw.randint(1, setup.work.completion_tokens)
        work = replace(setup.work, completion_tokens=length)
        groups.append(make_group(replace(setup.group.group.prompt), work, seed=len(groups)))
        made += work.unique_tokens
    return groups
