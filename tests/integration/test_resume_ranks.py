"""A run that is resumed on another number of processes is the run of one process that was not interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import CheckpointError
from rl_vlm.run.run import train
from tests.helpers import mixed_run, tiny_run
from tests.helpers.resuming import resumed
from tests.helpers.sharded_runs import launcher_file
from tests.helpers.tiny_run import completions, metric_lines, weights
from tests.helpers.two_processes import train_on_processes

NUM_STEPS = 6
"""A window is four of them: two passes over two steps of eight prompts."""


def make_config(checkpoint: Path, output_dir: Path, **settings: Any) -> RunConfig:
    shared = {
        "dataset_name": mixed_run.ROWS, "reward_funcs": [mixed_run.REWARD], "num_generations": 2,
        "prompts_per_step": 8, "steps_per_generation": 2, "num_iterations": 2, "max_steps": NUM_STEPS,
        "adam_epsilon": 1e-4,
    }  # fmt: skip
    return tiny_run.make_config(checkpoint, output_dir, **(shared | settings))


@pytest.fixture(scope="module")
def saved(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The directories of runs with all of their checkpoints, by number of processes."""
    folder = tmp_path_factory.mktemp("saved")
    train(make_config(tiny_checkpoint, folder / "1"))
    train_on_processes(2, make_config(tiny_checkpoint, folder / "2"), folder / "2.yaml")
    return {1: folder / "1", 2: folder / "2"}


def stopped_at(step: int, run: Path, copy: Path) -> None:
    """Copy a run without the checkpoints after `step`."""
    shutil.copytree(run, copy)
    for path in copy.glob("checkpoint-*"):
        if int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)


def own_states(checkpoint: Path) -> list[dict[str, Any]]:
    """The collectors' states of all ranks."""
    paths = sorted(checkpoint.glob("rank_*.pt"))
    return [torch.load(path, weights_only=True)["collector"] for path in paths]


def draws_by_step(checkpoint: Path) -> list[list[tuple[int, int]]]:
    """Epoch and row of all groups of the window in training, over all ranks, by its optimizer steps."""
    windows = [state["window"]["steps"] for state in own_states(checkpoint)]
    return [sorted(tuple(g["draw"]) for part in parts for g in part) for parts in zip(*windows, strict=True)]


def sampled(output_dir: Path) -> dict[tuple[str, int], tuple[str, float]]:
    rows = [row for rows in completions(output_dir).values() for row in rows]
    return {(row["group_id"], row["completion_index"]): (row["completion"], row["advantage"]) for row in rows}


def assert_continued(run: Path, straight: Path, step: int) -> None:
    """Assert that a run resumed after `step` is the run of one process that was not interrupted."""
    for later in [s for s in range(step + 1, NUM_STEPS + 1) if s != 4]:  # after step 4 there is no window
        draws = draws_by_step(run / f"checkpoint-{later}")
        assert draws == draws_by_step(straight / f"checkpoint-{later}")
        assert sorted(row for draws_of_step in draws for _, row in draws_of_step) == list(range(16))
    assert sampled(run) == sampled(straight)
    lines = list(zip(metric_lines(run), metric_lines(straight), strict=True))
    assert [line["step"] for line, _ in lines] == list(range(1, NUM_STEPS + 1))
    for line, expected in lines:
        for name in {name for name in expected if not name.startswith(("compute/", "balance/"))}:
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (line["step"], name)
    found, expected = (weights(path / f"checkpoint-{NUM_STEPS}") for path in (run, straight))
    start = weights(straight / "checkpoint-1")
    assert max((found[name] - tensor).abs().max() for name, tensor in expected.items()) <= 1e-5
    assert max((start[name] - tensor).abs().max() for name, tensor in expected.items()) > 1e-2


@pytest.mark.parametrize(
    ("num_saved", "num_present", "step"),
    [
        pytest.param(2, 1, 3, id="2 to 1 within a window"),
        pytest.param(2, 1, 4, id="2 to 1 between windows", marks=pytest.mark.slow),
        pytest.param(2, 4, 3, id="2 to 4 within a window", marks=pytest.mark.slow),
        pytest.param(2, 4, 4, id="2 to 4 between windows", marks=pytest.mark.slow),
        pytest.param(1, 4, 1, id="1 to 4 within a window", marks=pytest.mark.slow),
    ],
)
def test_every_prompt_is_trained_on_once(
    num_saved: int, num_present: int, step: int, saved: dict[int, Path], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    run, straight = tmp_path / "run", saved[1]
    stopped_at(step, saved[num_saved], run)
    config = resumed(make_config(tiny_checkpoint, run))
    if num_present == 1:
        train(config)
    else:
        train_on_processes(num_present, config, tmp_path / "run.yaml")

    assert len(own_states(run / f"checkpoint-{NUM_STEPS}")) == num_present
    assert_continued(run, straight, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shardings",
    [
        ("zero3", "zero3", "zero3"), ("fsdp2", "fsdp2", "fsdp2"),
        ("zero2", "zero3", "fsdp2"), ("fsdp2", "zero2", "zero3"), ("zero3", "ddp", "zero2"), ("ddp", "fsdp2", "ddp"),
    ],
    ids=" to ".join,
)  # fmt: skip
def test_runs_continue_on_other_shardings_and_numbers_of_processes(
    shardings: tuple[str, str, str], saved: dict[int, Path], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Saved by 2 processes at step 3, by 1 at step 5, by 4 at the end; each time in the middle of a window."""
    on_two, on_one, on_four = tmp_path / "2", tmp_path / "1", tmp_path / "4"
    files = [launcher_file(sharding, tmp_path) for sharding in shardings]
    train_on_processes(2, make_config(tiny_checkpoint, on_two), tmp_path / "run.yaml", files[0])
    stopped_at(3, on_two, on_one)
    train_on_processes(1, resumed(make_config(tiny_checkpoint, on_one)), tmp_path / "run.yaml", files[1])
    stopped_at(5, on_one, on_four)
    train_on_processes(4, resumed(make_config(tiny_checkpoint, on_four)), tmp_path / "run.yaml", files[2])

    assert [len(own_states(on_four / f"checkpoint-{step}")) for step in (3, 4, 5, 6)] == [2, 1, 1, 4]
    assert_continued(on_four, saved[1], step=3)


def test_the_same_number_of_processes_repeats_the_run_bit_for_bit(
    saved: dict[int, Path], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Also a window whose groups were dealt before it was saved."""
    run, straight = tmp_path / "run", saved[2]
    stopped_at(3, straight, run)
    train_on_processes(2, resumed(make_config(tiny_checkpoint, run)), tmp_path / "run.yaml")
    assert metric_lines(run) == metric_lines(straight)
    assert completions(run) == completions(straight)
    found, expected = (weights(path / f"checkpoint-{NUM_STEPS}") for path in (run, straight))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    sizes = [[len(step) for step in state["window"]["steps"]] for state in own_states(straight / "checkpoint-3")]
    assert [sum(both) for both in zip(*sizes, strict=True)] == [8, 8]
    assert sizes[0] != [4, 4]  # as they were drawn


def test_sizes_per_device_must_make_the_same_batch(
    saved: dict[int, Path], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    stopped_at(3, saved[2], tmp_path / "run")
    per_device = {"prompts_per_step": None, "per_device_train_batch_size": 8, "steps_per_generation": 2}
    with pytest.raises(CheckpointError) as refusal:
        train(resumed(make_config(tiny_checkpoint, tmp_path / "run", **per_device)))
    assert str(refusal.value).endswith(
        "checkpoint-3 was written by 2 processes, with 8 prompts per optimizer step and 2 steps per generation window. "
        "This run has 1 processes, and its settings make 4 and 2. Set train.gradient_accumulation_steps: 2, "
        "train.steps_per_generation: 4 to keep the batch."
    )
    mended = {**per_device, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    train(resumed(make_config(tiny_checkpoint, tmp_path / "run", **mended)))
    ours, theirs = metric_lines(tmp_path / "run")[-1], metric_lines(saved[1])[-1]
    assert (ours["step_tokens"], ours["reward"]) == (theirs["step_tokens"], pytest.approx(theirs["reward"]))


@pytest.mark.slow
def test_paused_completions_are_continued(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Which of them are finished first depends on the number of processes, so the windows are others."""
    settings = {"max_rollout_tokens": 3, "max_completion_length": 12, "steps_per_generation": 1, "num_iterations": 1}
    config = make_config(tiny_checkpoint, tmp_path / "run", **settings, prompts_per_step=4, max_steps=2)
    train_on_processes(2, config, tmp_path / "run.yaml")
    paused = [group for state in own_states(tmp_path / "run" / "checkpoint-2") for group in state["in_flight"]]
    assert len(paused) == 4
    longer = config.train.model_copy(update={"max_steps": 4})
    train(resumed(config.model_copy(update={"train": longer})))
    (state,) = own_states(tmp_path / "run" / "checkpoint-4")
    in_flight = [group["group_id"] for group in state["in_flight"]]
    trained = list(dict.fromkeys(group_id for group_id, _ in sampled(tmp_path / "run")))
    assert {group["group_id"] for group in paused} <= {*trained, *in_flight}
    assert (len(trained), len(in_flight), state["loader"]["cursor"]) == (4 * 4, 4, 20)
    seen = [group_id.split("/", 1)[1] for group_id in [*trained, *in_flight]]  # epoch and sample
    assert len(set(seen)) == 20
    assert sum(name.startswith("0/") for name in seen) == 16
