"""An optimizer step does not depend on how its batch is cut: into micro-batches, by sharing, or between processes."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_vlm.algorithm.objective import configured_loss
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import AlgorithmConfig, RunConfig
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.rollout.collector import Collector
from rl_vlm.rollout.window import Window
from rl_vlm.run.run import Run, train
from rl_vlm.trainer import Trainer
from tests.helpers import mixed_run, tiny_run
from tests.helpers.builders import gradient_error, sharpen, take_gradients
from tests.helpers.tiers import in_tiers
from tests.helpers.two_processes import launch, train_on_two_processes

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
CUTS = {
    "all in one, dense": (10_000, "dense"),
    "all in one, shared": (10_000, "shared"),
    "whole groups, shared": (150, "shared"),
    "split groups, shared": (60, "shared"),
    "a completion each, shared": (1, "shared"),
    "a completion each, dense": (1, "dense"),
    "as pays": (100, "auto"),
}
"""Budget in tokens, those of vision included, and sharing."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_run.build_checkpoint(tmp_path_factory.mktemp("tiny")))


def make_config(checkpoint: Path, output_dir: Path, **settings: Any) -> RunConfig:
    shared = {
        "dataset_name": mixed_run.ROWS,
        "reward_funcs": [mixed_run.REWARD],
        "shuffle_dataset": False,
        "prompts_per_step": 4,
        "seed": 3,
    }
    return tiny_run.make_config(checkpoint, output_dir, **(shared | settings))


# One step, cut differently


@pytest.fixture(scope="module")
def trainer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """With its first window generated, for two iterations, and nothing computed of it so far."""
    settings = {"beta": 0.1, "num_iterations": 2, "max_grad_norm": 0.0}
    run = Run(make_config(checkpoint, tmp_path_factory.mktemp("run"), **settings))
    run.collector.current(run.progress, StepMetrics())
    yield run.trainer
    run.close()


@contextmanager
def moved(policy: nn.Module) -> Iterator[None]:
    """Run the block with other weights than those that generated the window and are the reference."""
    weights, generator = copy.deepcopy(policy.state_dict()), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
    yield
    policy.load_state_dict(weights)


def window_of(trainer: Trainer) -> Window:
    assert isinstance(trainer.collector, Collector) and trainer.collector.window is not None
    return trainer.collector.window


def steps(
    trainer: Trainer, budget: int, sharing: Any, monkeypatch: pytest.MonkeyPatch, **algorithm: Any
) -> tuple[float, dict[str, Tensor], int]:
    """Take both steps of the window, the second with a policy that has moved away from old and reference log-probs.

    Return loss, gradients and number of micro-batches of the second. All log-probs are computed under this cut.
    """
    window = window_of(trainer)
    assert trainer.reference is not None
    gradients: dict[str, Tensor] = {}
    updates = trainer.optimizer.torch_optimizer
    monkeypatch.setattr(updates, "step", lambda: gradients.update(take_gradients(trainer.policy)))
    monkeypatch.setattr(trainer.passes, "sharing", sharing)
    token_budget = trainer.recovery.budget
    token_budget.load_state_dict(token_budget.state_dict() | {"tokens": budget})
    monkeypatch.setattr(trainer.config, "algorithm", AlgorithmConfig(**algorithm))
    monkeypatch.setattr(trainer, "loss_form", configured_loss(trainer.config.algorithm))
    window.updates_done = 0
    for scored in window.groups:
        scored.old_logprobs.clear()
        scored.ref_logprobs.clear()
    trainer.step()
    assert_log_probs_are_the_generators(window)
    with moved(trainer.policy):
        metrics = trainer.step()
    num_forwards = metrics.sums["compute/shared_forwards"] + metrics.sums["compute/dense_forwards"]
    return metrics.means["loss"][0], gradients, int(num_forwards)


def assert_log_probs_are_the_generators(window: Window) -> None:
    """Check those that the window's first step has stored: policy and reference are still the generator's weights."""
    for scored in window.groups:
        for i, completion in enumerate(scored.group.completions):
            if scored.valid_G[i]:
                for logprobs in (scored.old_logprobs[i], scored.ref_logprobs[i]):
                    assert (logprobs - completion.generator_logprobs).abs().max() <= 2e-5


@pytest.mark.parametrize("loss_type", in_tiers(LOSS_TYPES, (), {"dapo", "dr_grpo", "sapo"}))
def test_loss_and_gradient_do_not_depend_on_the_cut(
    trainer: Trainer, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"loss_type": loss_type, "beta": 0.1, "num_iterations": 2, "mask_truncated_completions": True}
    algorithm |= {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    results = {name: steps(trainer, *cut, monkeypatch, **algorithm) for name, cut in CUTS.items()}
    expected_loss, expected_gradients, _ = results["all in one, dense"]
    for loss, gradients, _ in results.values():
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        assert gradient_error(gradients, expected_gradients) <= 1e-5

    num_completions = sum(int(scored.valid_G.sum()) for scored in window_of(trainer).groups)
    num_micro_batches = [num for _, _, num in results.values()]
    assert num_micro_batches[:3] == [1, 1, 3]
    assert 3 < num_micro_batches[3] < num_completions < 16
    assert num_micro_batches[4:6] == [num_completions] * 2


def test_losses_tell_each_other_apart(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    dapo = steps(trainer, 10_000, "dense", monkeypatch, loss_type="dapo", beta=0.1)
    grpo = steps(trainer, 10_000, "dense", monkeypatch, loss_type="grpo", beta=0.1)
    assert gradient_error(grpo[1], dapo[1]) > 0.1


# Two processes against one


def sampled(output_dir: Path) -> dict[tuple[str, int], tuple[str, float]]:
    """Text and advantage of every completion by group and index; in the files each rank's rows come together."""
    rows = [row for rows in tiny_run.completions(output_dir).values() for row in rows]
    return {(row["group_id"], row["completion_index"]): (row["completion"], row["advantage"]) for row in rows}


def assert_two_processes_train_as_one(checkpoint: Path, tmp_path: Path, **settings: Any) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl` of the run on two processes."""
    settings = {"adam_epsilon": 1e-4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", **settings}
    one, two = tmp_path / "one", tmp_path / "two"
    train(make_config(checkpoint, one, **settings))
    train_on_two_processes(make_config(checkpoint, two, **settings), tmp_path / "two.yaml")
    assert sampled(one) == sampled(two)

    lines = list(zip(tiny_run.metric_lines(one), tiny_run.metric_lines(two), strict=True))
    assert [line["step"] for _, line in lines] == list(range(1, settings["max_steps"] + 1))
    for expected, line in lines:
        for name in {
            name for name in expected if not name.startswith(("compute/", "balance/"))
        }:  # with dummies; by rank
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (line["step"], name)
        name = f"checkpoint-{line['step']}"
        expected_weights, weights = tiny_run.weights(one / name), tiny_run.weights(two / name)
        assert weights.keys() == expected_weights.keys()
        assert max((weights[n] - w).abs().max() for n, w in expected_weights.items()) <= 1e-5
    first, last = tiny_run.weights(two / "checkpoint-1"), tiny_run.weights(two / name)
    assert max((last[n] - w).abs().max() for n, w in first.items()) > 1e-2
    return [line for _, line in lines]


def test_two_processes_train_as_one(checkpoint: Path, tmp_path: Path) -> None:
    """Windows of two optimizer steps and two iterations; in step 6 one group has variance, of which there are four."""
    lines = assert_two_processes_train_as_one(
        checkpoint, tmp_path, max_steps=6, gradient_accumulation_steps=1, steps_per_generation=2, num_iterations=2,
        micro_batch_tokens=150, mask_truncated_completions=True,
    )  # fmt: skip
    assert "compute/dense_forwards" not in lines[5]  # the other process runs nothing, not even dummies


@pytest.mark.slow
def test_long_rows_of_one_process_are_trained_on_by_both(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"dataset_name": mixed_run.LONG_FIRST, "prefix_sharing": "shared", "freeze_vision_tower": True}
    lines = assert_two_processes_train_as_one(
        checkpoint, tmp_path, max_steps=4, gradient_accumulation_steps=1, steps_per_generation=2, **settings
    )
    (one, *_) = tiny_run.metric_lines(tmp_path / "one")
    for line, drawn in zip(lines, drawn_tokens(tmp_path / "two"), strict=True):
        assert max(drawn) / (sum(drawn) / 2) > 1.6
        assert line["balance/tokens_mean"] == sum(drawn) / 2
        assert line["balance/tokens_max"] / line["balance/tokens_mean"] < 1.1
    assert one["balance/tokens_max"] == one["balance/tokens_mean"] == sum(drawn_tokens(tmp_path / "two")[0])
    for timed in map(json.loads, (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()):
        assert timed["time/training"] > timed["balance/seconds_max"] >= timed["balance/seconds_mean"] > 0


def drawn_tokens(output_dir: Path) -> list[list[int]]:
    """By optimizer step and process, the prompt and completion tokens of the groups that the process has drawn.

    Files have the windows' groups by process; here a process draws two groups for each of two steps.
    """
    steps = []
    for rows in tiny_run.completions(output_dir).values():
        groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        valid = [[row["completion_length"] for row in group if row["reward"] is not None] for group in groups]
        tokens = [group[0]["prompt_length"] + sum(own) for group, own in zip(groups, valid, strict=True)]
        steps += [[sum(tokens[start : start + 2]) for start in (first, first + 4)] for first in (0, 2)]
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "loss_type": "grpo", "scale_rewards": "batch"},
        {"beta": 0.1, "use_peft": True, "lora_r": 4},
        {"freeze_vision_tower": True, "gradient_checkpointing": True, "top_entropy_quantile": 0.5},
        {
            "loss_normalizer": "window",
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 2,
            "num_iterations": 2,
        },
    ],
    ids=["KL", "LoRA", "frozen vision", "tokens of the window"],
)
def test_two_processes_train_as_one_in_other_settings(
    checkpoint: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert_two_processes_train_as_one(checkpoint, tmp_path, max_steps=4, micro_batch_tokens=100, **settings)


def test_a_launcher_that_starts_one_process_of_two_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(make_config(checkpoint, tmp_path / "run")))
    result = launch("--cpu", "--num_processes", "2", "-m", "launch.train", str(path))
    assert result.returncode != 0
    assert "this one sees 1 and would train alone" in result.stderr
    assert "--config_file launch/accelerate/cpu.yaml" in result.stderr
    assert not (tmp_path / "run").exists()
