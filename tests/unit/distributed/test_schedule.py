"""The learning rate of each step, by hand and against transformers."""

import pytest
import torch
from transformers import TrainingArguments

from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer, warmup_steps
from rl_vlm.distributed.ranks import Ranks


def learning_rates(num_steps: int, **settings) -> list[float]:
    train = TrainConfig(learning_rate=1.0, **settings)
    optimizer = Optimizer(DDP(Ranks(), train.max_grad_norm), torch.nn.Linear(2, 2), train, num_steps)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.learning_rate)
        optimizer.advance_schedule()
    return rates


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"warmup_steps": 2}, [0, 1 / 2, 1, 2 / 3, 1 / 3]),
        ({"warmup_steps": 0.3}, [0, 1 / 2, 1, 2 / 3, 1 / 3]),  # 1.5 steps, rounded up
        ({"warmup_steps": 0.03}, [0, 1, 3 / 4, 2 / 4, 1 / 4]),  # 0.15 steps
        ({"warmup_steps": 2.9}, [0, 1 / 2, 1, 2 / 3, 1 / 3]),  # 2 steps
        ({"warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"}, [0, 1 / 2, 1, 1, 1]),
    ],
)
def test_learning_rates(settings, expected):
    assert learning_rates(5, **settings) == pytest.approx(expected)


@pytest.mark.parametrize("num_steps", [1, 7, 100, 1000])
@pytest.mark.parametrize("setting", [0, 0.001, 0.03, 0.1, 0.5, 0.999, 1, 1.7, 25])
def test_warm_up_is_rounded_like_transformers(setting, num_steps, tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), warmup_steps=setting, use_cpu=True)
    assert warmup_steps(float(setting), num_steps) == arguments.get_warmup_steps(num_steps)
