"""Runs with an environment on two processes, of which one samples trajectories while the other has none left."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_run
from tests.helpers.calling import NUM_LOOKS, SHADES, STEPS, calling_checkpoint
from tests.helpers.sharded_runs import Runs, differences
from tests.helpers.tiers import in_tiers

TURNS: dict[str, Any] = {
    "dataset_name": tiny_run.ROWS, "environment": SHADES, "reward_funcs": [NUM_LOOKS], "num_generations": 4,
    "max_completion_length": 220, "max_turns": 4, "micro_batch_tokens": 4096, "max_steps": 3,
}  # fmt: skip
BY_LAYER = {"ds3_gather_for_generation": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calling_checkpoint(tmp_path_factory.mktemp("calling"))


@pytest.fixture(scope="module")
def one(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs.of(tmp_path_factory.mktemp("one"), {"turns": {"checkpoint": checkpoint, **TURNS}}).train()


@pytest.mark.parametrize("sharding", in_tiers(["ddp", "zero2", "zero3", "fsdp2"], (), ()))
def test_two_processes_train_on_the_trajectories_of_one(
    sharding: str, checkpoint: Path, one: Runs, tmp_path: Path
) -> None:
    settings = {"checkpoint": checkpoint, **TURNS}
    variants = {"turns": settings, **({"by_layer": settings | BY_LAYER} if sharding in ("zero3", "fsdp2") else {})}
    two = Runs.of(tmp_path, variants).launch(sharding)
    rows = [row for rows in tiny_run.completions(one["turns"]).values() for row in rows]
    assert len({row["finish_reason"] for row in rows}) > 1
    for name in variants:
        found = differences(one["turns"], two[name])
        print(sharding, name, found)
        assert found.losses <= 1e-5 and found.norms <= 1e-4 and found.gradients <= 1e-5
        assert found.weights <= 1e-3


EDITED: dict[str, Any] = TURNS | {
    "environment": STEPS, "environment_protocol": "steps", "environment_kwargs": {"num_steps": 4}, "keep_images": 1,
    "edit_every": 1, "max_turns": 5, "max_completion_length": 400, "importance_sampling_level": "sequence",
    "num_iterations": 2, "max_steps": 4, "epsilon": 5.0,
}  # fmt: skip


@pytest.mark.parametrize("sharding", in_tiers(["ddp", "zero3", "fsdp2"], (), {"fsdp2"}))
def test_two_processes_cut_edited_contexts_as_one_does_not(sharding: str, checkpoint: Path, tmp_path: Path) -> None:
    """GSPO's second update has one more forward of what is cut, and of dummies on the process that has less of it."""
    settings = {"checkpoint": checkpoint, **EDITED}
    one = Runs.of(tmp_path / "one", {"edited": settings | {"micro_batch_tokens": 100_000}}).train()
    two = Runs.of(tmp_path / "two", {"edited": settings | {"micro_batch_tokens": 600}}).launch(sharding)
    forwards = [
        sum(line["compute/shared_forwards"] for line in tiny_run.metric_lines(runs["edited"])) for runs in (one, two)
    ]
    assert forwards[1] > 2 * forwards[0]
    found = differences(one["edited"], two["edited"])
    print(sharding, found)
    assert found.losses <= 1e-5 and found.norms <= 1e-4 and found.gradients <= 1e-5
