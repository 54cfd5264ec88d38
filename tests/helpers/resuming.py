"""Runs of seconds that are killed or fail, and are resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.run.run import Run, train
from tests.helpers import tiny_run
from tests.helpers.tiny_run import completions, make_config, metric_lines, weights

NUM_STEPS = 5
REWARDS = [tiny_run.TOKEN_SUM, tiny_run.COIN]

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "planned_budget": {"micro_batch_tokens": "auto"},
    "lora": {"use_peft": True, "lora_r": 4},
    "lora_with_reference": {"use_peft": True, "lora_r": 4, "beta": 0.1},
    "reference": {"beta": 0.1},
    "moving_reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "window": {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2},
    "lora_window": {"use_peft": True, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2},
    "evaluated": {  # nothing is updated: after a checkpoint, only a resumed run sends weights
        "eval_dataset_name": tiny_run.HELD_OUT_ROWS, "eval_steps": 1, "eval_on_start": False,
        "reward_funcs": [tiny_run.CONSTANT],
    },
    "qlora": {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True, "beta": 0.1},
    "bfloat16": {"dtype": "bfloat16", "use_peft": True},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "adafactor": {"optim": "adafactor"},
    "partial_rollouts": {
        "max_rollout_tokens": 4, "max_completion_length": 24, "num_generations": 2, "prompts_per_step": 4,
    },
}  # fmt: skip


class Killed(BaseException):
    """Stands for a kill: nothing of the trainer runs after it."""


def config_of(variant: str, model: Path, output_dir: Path, **settings: Any) -> RunConfig:
    return make_config(
        model, output_dir, **{"max_steps": NUM_STEPS, "reward_funcs": REWARDS, **VARIANTS[variant], **settings}
    )


def train_until(step: int, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until the metrics of `step` are written and its checkpoint is not."""
    write_metrics = Run.write_metrics

    def record_and_die(run: Run, line: dict[str, Any]) -> None:
        write_metrics(run, line)
        if line["step"] == step:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "write_metrics", record_and_die)
        train(config)


def resumed(config: RunConfig) -> RunConfig:
    train = config.train.model_copy(update={"resume_from_checkpoint": "auto"})
    return config.model_copy(update={"train": train})


def assert_same_run(found: Path, expected: Path, last: int = NUM_STEPS) -> None:
    assert metric_lines(found) == metric_lines(expected)
    assert completions(found) == completions(expected)
    checkpoint = f"checkpoint-{last}"
    for folder in (checkpoint, f"{checkpoint}/reference"):
        ours, theirs = weights(found / folder), weights(expected / folder)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
