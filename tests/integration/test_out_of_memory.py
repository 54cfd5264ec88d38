"""Runs that run out of memory train as runs that never do: forward, backward, update and rollout under a cap."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import OutOfMemory
from rl_vlm.log.files import BUDGET
from rl_vlm.model.policy import Policy
from rl_vlm.passes.changes import BudgetChange, read_changes, write_changes
from rl_vlm.rollout.agreement import AgreementCheck
from rl_vlm.run.run import Run, train
from tests.helpers import mixed_run, tiny_run
from tests.helpers.resuming import resumed
from tests.helpers.sharded_runs import Runs, differences, distance, sampled
from tests.helpers.tiers import in_tiers
from tests.helpers.tiny_run import completions, metric_lines, weights
from tests.integration import capped_runs
from tests.integration.capped_runs import Trained, largest_difference, train_capped

NUM_STEPS = 4
# A checkpoint that a thread still writes would count as memory, so that peaks would depend on the speed of the disk.
SETTINGS: dict[str, Any] = {
    "dataset_name": mixed_run.UNLIKE_ROWS, "reward_funcs": [mixed_run.REWARD], "shuffle_dataset": False, "seed": 3,
    "prompts_per_step": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": NUM_STEPS, "beta": 0.04,
    "max_num_seqs": 16, "micro_batch_tokens": 160, "async_save": False,
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


@pytest.mark.parametrize(
    ("stage", "share"),
    [
        pytest.param("forward", 0.85, marks=pytest.mark.slow),
        ("backward", 0.85),
        pytest.param("update", 0.5, marks=pytest.mark.slow),
        ("rollout", 0.6),
    ],
)
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


def test_events_of_the_check_of_an_engine_are_counted(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check's forward is the first of the policy, which rollouts with engine hf do not call."""
    run = Run(make_config(tiny_checkpoint, tmp_path, beta=0.0))
    monkeypatch.setattr(AgreementCheck, "is_due", lambda check, progress: progress.global_step == 0)
    forward, num_calls = Policy.forward, 0

    def fail_first(policy: Policy, *arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise torch.OutOfMemoryError("Tried to allocate 1 byte")
        return forward(policy, *arguments)

    monkeypatch.setattr(Policy, "forward", fail_first)
    steps = [run.trainer.step().reduce(run.ranks.gather) for _ in range(2)]
    run.close()
    assert [metrics.get("out_of_memory/check") for metrics in steps] == [1, None]


def test_a_single_completion_that_does_not_fit_is_named(
    uncapped: tuple[Path, Trained], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    start = uncapped[1].ranges["forward", 2].start
    message = r"a single completion of sample row-\d+ with images of \d+x\d+.* pixels does not fit in memory: out of "
    with pytest.raises(OutOfMemory, match=message + r"memory with 1 completions.*gradient_checkpointing.*max_pixels"):
        train_capped(make_config(tiny_checkpoint, tmp_path), "forward", 2, start)
    assert (tmp_path / "checkpoint-1").is_dir() and not (tmp_path / "checkpoint-2").exists()


def test_optimizer_state_that_does_not_fit_changes_no_weight(
    uncapped: tuple[Path, Trained], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped_runs, "UPDATES_CAPPED", 2)
    cap = uncapped[1].ranges["update", 1].at(0.5)
    with pytest.raises(OutOfMemory, match=r"before any weight was updated\. Set model\.use_peft") as raised:
        train_capped(make_config(tiny_checkpoint, tmp_path), "update", 1, cap)
    assert raised.value.on_all_ranks


@pytest.fixture(scope="module")
def straight(uncapped: tuple[Path, Trained], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose second step runs out of memory."""
    directory = tmp_path_factory.mktemp("straight")
    cap = uncapped[1].ranges["backward", 2].at(0.85)
    assert train_capped(make_config(tiny_checkpoint, directory), "backward", 2, cap).num_failures > 0
    return directory


@pytest.mark.parametrize("killed_before", in_tiers([2, 3], (), {3}))
def test_a_resumed_run_replays_the_budget(
    killed_before: int, straight: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """It is the run that was not interrupted, bitwise: the event of step 2 is replayed, or in the checkpoint."""
    copy = tmp_path / "copy"
    shutil.copytree(straight, copy)
    for step in range(killed_before, NUM_STEPS + 1):
        shutil.rmtree(copy / f"checkpoint-{step}")
    train(resumed(make_config(tiny_checkpoint, copy)))
    assert metric_lines(copy) == metric_lines(straight)
    assert completions(copy) == completions(straight)
    last = f"checkpoint-{NUM_STEPS}"
    found, expected = weights(copy / last), weights(straight / last)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert (copy / BUDGET).read_text() == (straight / BUDGET).read_text()


@pytest.mark.slow
def test_a_changed_setting_replaces_the_recorded_budget(tiny_checkpoint: Path, tmp_path: Path) -> None:
    train(make_config(tiny_checkpoint, tmp_path, max_steps=1))
    write_changes(tmp_path, [BudgetChange(2, "training", 40, 160, "out_of_memory", "…")])
    train(resumed(make_config(tiny_checkpoint, tmp_path, max_steps=2, micro_batch_tokens=100)))
    assert [line["memory/micro_batch_tokens"] for line in metric_lines(tmp_path)] == [160, 100]
    assert read_changes(tmp_path) == []


def test_a_run_without_a_checkpoint_is_repeated_under_its_recorded_budget(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    change = BudgetChange(2, "training", 40, 160, "out_of_memory", "…")
    write_changes(tmp_path, [change])
    train(resumed(make_config(tiny_checkpoint, tmp_path, max_steps=2)))
    assert [line["memory/micro_batch_tokens"] for line in metric_lines(tmp_path)] == [160, 40]
    assert read_changes(tmp_path) == [change]


@pytest.mark.slow
def test_the_budget_is_replayed_in_another_directory(tiny_checkpoint: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    train(make_config(tiny_checkpoint, one, max_steps=1))
    changes = [BudgetChange(step, "training", 200 // step, 160, "out_of_memory", "…") for step in (1, 2, 9)]
    write_changes(one, changes)
    settings = {"max_steps": 3, "resume_from_checkpoint": str(one / "checkpoint-1")}
    train(make_config(tiny_checkpoint, other, **settings))
    assert [line["memory/micro_batch_tokens"] for line in metric_lines(other)] == [100, 100]
    assert read_changes(other) == changes


def test_two_processes_of_which_one_runs_out_of_memory_train_as_one(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = {"checkpoint": tiny_checkpoint, **SETTINGS, "micro_batch_tokens": 400}
    names = ["fits", "out-of-memory-forward", "out-of-memory-backward"]
    one = Runs.of(tmp_path / "one", {"fits": settings}).train()
    two = Runs.of(tmp_path / "two", dict.fromkeys(names, settings)).launch("ddp")
    for name in names:
        found = differences(one["fits"], two[name])
        assert found.gradients <= 1e-5 and found.weights <= 1e-3
        events = [line.get("out_of_memory/training", 0) for line in metric_lines(two[name])]
        assert events == ([0] * NUM_STEPS if name == "fits" else [1, 1, 0, 0])


@pytest.mark.parametrize("engine", in_tiers(["zero2", "fsdp2"], (), ()))
def test_ranks_that_share_a_model_end_and_resume_under_the_new_budget(
    engine: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    settings = {"checkpoint": tiny_checkpoint, **SETTINGS, "micro_batch_tokens": 400}
    failing = Runs.of(tmp_path, {"out-of-memory-backward": settings}).launch(engine)
    log = (tmp_path / "log").read_text()
    assert "ranks that share a model cannot repeat a pass alone" in log
    assert "timed out" not in log
    assert not (tmp_path / "out-of-memory-backward" / "summary.json").exists()
    (change,) = read_changes(tmp_path / "out-of-memory-backward")
    assert (change.step, change.stage) == (2, "training") and change.micro_batch_tokens < 200
    (tmp_path / "resumed").mkdir()
    config = resumed(failing.configs["out-of-memory-backward"])
    Runs(tmp_path / "resumed", {"run": config}).write().launch(engine)
    lines = metric_lines(tmp_path / "out-of-memory-backward")
    assert [line["memory/micro_batch_tokens"] for line in lines] == [400] + [change.micro_batch_tokens] * 3


@pytest.mark.slow
def test_fifty_runs_under_random_caps_finish_as_the_one_without(
    uncapped: tuple[Path, Trained], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    draws = random.Random(0)
    least = {"forward": 0.88, "backward": 0.88, "update": 0.1, "rollout": 0.5}
    num_events = dict.fromkeys(least, 0)
    for i in range(50):
        stage = draws.choice(list(least))
        step = 1 if stage == "update" else draws.randint(1, NUM_STEPS)
        cap = uncapped[1].ranges[stage, step].at(draws.uniform(least[stage], 0.98))
        trained = train_capped(make_config(tiny_checkpoint, tmp_path / str(i)), stage, step, cap)
        assert_trained_as(uncapped, tmp_path / str(i), trained, step, tiny_checkpoint)
        num_events[stage] += trained.num_failures
    print(num_events)
    assert min(num_events.values()) > 0
