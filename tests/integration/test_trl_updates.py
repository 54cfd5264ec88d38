"""Updates of whole windows against TRL's own `train()` on the same completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from rl_vlm.run.run import Run
from tests.helpers import tiny_run, trl_oracle

NUM_WINDOWS = 2
NUM_ITERATIONS = 4
SETTINGS: dict[str, Any] = {
    "num_iterations": NUM_ITERATIONS, "max_steps": NUM_WINDOWS * NUM_ITERATIONS, "max_completion_length": 6,
    "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "shuffle_dataset": False,
    "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_grad_norm": 0.3, "weight_decay": 0.0,
}  # fmt: skip
METRICS = ["loss", "grad_norm", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"]


class Update(NamedTuple):
    """What an update logs, the learning rate that it uses, and the weights after it."""

    metrics: dict[str, float]
    learning_rate: float
    weights: dict[str, Tensor]


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def half_constant(completion_ids: list[list[int]], solution: list[str], **_: Any) -> list[float]:
    """Rewards that are equal in the groups of odd digits."""
    sums = tiny_run.token_sum(completion_ids)
    return [0.5 if int(gold) % 2 else reward for reward, gold in zip(sums, solution, strict=True)]


def our_updates(checkpoint: Path, output_dir: Path, reward: str) -> tuple[list[Update], list[trl_oracle.Rollouts]]:
    """The updates of a run, and the completions and rewards of its windows."""
    updates, windows = [], []
    # The policy is trained with tokens that the engine never samples, which the check at the start refuses.
    run = Run(tiny_run.make_config(checkpoint, output_dir, reward_funcs=[reward], verify="off", **SETTINGS))
    run.trainer.policy.banned_token_ids = []  # TRL's log-probs have a share for placeholder tokens
    try:
        for step in range(SETTINGS["max_steps"]):
            line = run.next_step()
            updates.append(Update(line, line["learning_rate"], weights_of(run.trainer.policy.transformer)))
            if step % NUM_ITERATIONS == 0:
                assert run.collector.window is not None
                groups = run.collector.window.groups
                completion_ids = [c.token_ids.tolist() for scored in groups for c in scored.group.completions]
                rewards = [[reward] for scored in groups for reward in scored.rewards_G.tolist()]
                windows.append(trl_oracle.Rollouts(completion_ids, rewards))
    finally:
        run.close()
    return updates, windows


class Recorder(TrainerCallback):
    """Gives TRL's trainer the completions of each window, and records its updates."""

    def __init__(self, current: trl_oracle.Rollouts, windows: list[trl_oracle.Rollouts]) -> None:
        self.current, self.windows = current, windows
        self.learning_rate = 0.0
        self.weights: dict[str, Tensor] = {}
        self.updates: list[Update] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        window = self.windows[state.global_step // NUM_ITERATIONS]
        self.current.completion_ids[:], self.current.rewards[:] = window.completion_ids, window.rewards

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.learning_rate = kwargs["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights = weights_of(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.updates.append(Update(dict(logs), self.learning_rate, self.weights))


def trl_updates(
    checkpoint: Path, output_dir: Path, windows: list[trl_oracle.Rollouts], num_micro_batches: int = 1
) -> list[Update]:
    """The updates of TRL's `train()` on these completions."""
    current = trl_oracle.Rollouts(list(windows[0].completion_ids), list(windows[0].rewards))
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "image": row["image"]} for row in tiny_run.rows()]
    settings = SETTINGS | {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    trainer = trl_oracle.make_trainer(checkpoint, output_dir, current, num_micro_batches, rows, **settings)
    recorder = Recorder(current, windows)
    trainer.add_callback(recorder)
    trainer.train()
    return recorder.updates


def distance(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert weights.keys() == others.keys()
    return sum(float((weights[name] - others[name]).square().sum()) for name in weights) ** 0.5


def test_several_updates_of_each_window_equal_trls(tiny_checkpoint, tmp_path):
    """With a schedule, clipped ratios and clipped gradients, and truncated completions."""
    ours, windows = our_updates(tiny_checkpoint, tmp_path / "ours", tiny_run.TOKEN_SUM)
    lengths = {len(ids) for window in windows for ids in window.completion_ids}
    assert min(lengths) < max(lengths) == SETTINGS["max_completion_length"]
    trls = trl_updates(tiny_checkpoint, tmp_path / "trl", windows)
    for our, trl in zip(ours, trls, strict=True):
        assert {n: our.metrics[n] for n in METRICS} == {n: pytest.approx(trl.metrics[n], abs=1e-6) for n in METRICS}
    for window in range(NUM_WINDOWS):
        clipped = [
            update.metrics["clip_ratio/region_mean"] for update in trls[NUM_ITERATIONS * window :][:NUM_ITERATIONS]
        ]
        assert clipped[0] == 0 < 0.1 < max(clipped)  # of old log-probs from the window's first update
    assert max(update.metrics["grad_norm"] for update in trls) > 2 * SETTINGS["max_grad_norm"]
    assert_same_weights(ours, trls, tiny_checkpoint)


def test_several_updates_with_a_group_that_is_left_out_equal_trls(tiny_checkpoint, tmp_path):
    """TRL trains on it, with advantages of 0; its tokens count in the loss. Two micro-batches per update."""
    ours, windows = our_updates(tiny_checkpoint, tmp_path / "ours", f"{__name__}:half_constant")
    assert [update.metrics["frac_reward_zero_std"] for update in ours] == [0.5] * len(ours)
    trls = trl_updates(tiny_checkpoint, tmp_path / "trl", windows, num_micro_batches=2)
    for our, trl in zip(ours, trls, strict=True):
        assert our.metrics["grad_norm"] == pytest.approx(trl.metrics["grad_norm"], rel=1e-5)
    assert_same_weights(ours, trls, tiny_checkpoint)


def assert_same_weights(ours: list[Update], trls: list[Update], initial: Path) -> None:
    """Assert that both sides have the same learning rates, and weights that differ by 1e-5 of their way at most."""
    assert [update.learning_rate for update in ours] == [update.learning_rate for update in trls]
    assert len(ours) == SETTINGS["max_steps"]
    start = {name: tensor for name, tensor in tiny_run.model_weights(initial).items() if name in ours[0].weights}
    for our, trl in zip(ours[1:], trls[1:], strict=True):  # the first has a learning rate of 0
        assert distance(our.weights, trl.weights) <= 1e-5 * distance(our.weights, start)
    last, before = ours[-1].weights, ours[-2].weights
    assert distance(last, before) > 1e-3 * distance(last, start)  # an update more or less would show
