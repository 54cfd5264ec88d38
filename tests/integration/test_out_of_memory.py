"""Runs that run out of memory train as runs that never do: forward, backward, update and rollout under a cap."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import OutOfMemory
from rl_vlm.log.budget import BUDGET, BudgetLog
from rl_vlm.run import train
from tests.helpers import mixed_run, tiny_run
from tests.helpers.capped_runs import Trained, largest_difference, train_capped
from tests.helpers.resuming import resumed
from tests.helpers.sharded_runs import distance, sampled
from tests.helpers.tiny_run import completions, metric_lines, weights

NUM_STEPS = 4
SETTINGS: dict[str, Any] = {
    "dataset_name": mixed_run.UNLIKE_ROWS, "reward_funcs": [mixed_run.REWARD], "shuffle_dataset": False, "seed": 3,
    "prompts_per_step": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": NUM_STEPS, "beta": 0.04,
    "max_num_seqs": 16, "micro_batch_tokens": 160,
}  # fmt: skip


def make_config(checkpoint: Path, output_dir: Path, **settings: Any) -> RunConfig:
    return tiny_run.make_config(checkpoint, output_dir, **(SETTINGS | settings))


@pytest.fixture(scope="module")
def uncapped(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    directory = tmp_path_factory.mktemp("uncapped")
    return directory, train_capped(make_config(tiny_checkpoint, directory))


def assert_trained_as(uncapped: tuple[Path, Trained], run: Path, trained: Trained, step: int, start: Path) -> None:
    """Assert that a run with an event in `step` has the completions, gradients and weights of the one without."""
    directory, expected = uncapped
    assert sampled(run) == sampled(directory)
    assert len(trained.gradients) == len(expected.gradients) == NUM_STEPS
    for gradients, others in zip(trained.gradients[:step], expected.gradients[:step], strict=True):
        assert largest_difference(gradients, others) <= 1e-5
    last, before = f"checkpoint-{NUM_STEPS}", weights(start)
    moved = distance(weights(directory / last), before)
    assert distance(weights(run / last), weights(directory / last)) <= 1e-3 * moved


@pytest.mark.parametrize(("stage", "share"), [("forward", 0.85), ("backward", 0.85), ("update", 0.5), ("rollout", 0.6)])
def test_a_run_that_runs_out_of_memory_trains_as_one_that_does_not(
    stage: str, share: float, uncapped: tuple[Path, Trained], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    step = 1 if stage == "update" else 2
    cap = uncapped[1].ranges[stage, step].at(share)
    trained = train_capped(make_config(tiny_checkpoint, tmp_path), stage, step, cap)
    assert trained.num_failures > 0
    assert_trained_as(uncapped, tmp_path, trained, step, tiny_checkpoint)

    lines = metric_lines(tmp_path)
    events = [sum(n for name, n in line.items() if name.startswith("out_of_memory/")) for line in lines]
    assert [num > 0 for num in events] == [number == step for number in range(1, NUM_STEPS + 1)]
    budgets = [line["memory/micro_batch_tokens"] for line in lines]
    if stage in ("forward", "backward"):
        assert budgets[step - 2] == 160 > budgets[step - 1] == budgets[-1]
    else:
        assert budgets == [160] * NUM_STEPS
