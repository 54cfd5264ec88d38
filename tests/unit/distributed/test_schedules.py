"""The learning rate of each step, by hand and against transformers."""

import subprocess
import sys
from typing import Any, get_args

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer, warmup_steps
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.schedules import Span, learning_rate_factor


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
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.0, "power": 2.0}},
            [1, 0.64, 0.36, 0.16, 0.04],
        ),
    ],
)
def test_learning_rates(settings, expected):
    assert learning_rates(5, **settings) == pytest.approx(expected)


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.3}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 0.1, "power": 2.0}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 7}),
    ("cosine_with_min_lr", {"min_lr": 0.1}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 0.7}),
    ("warmup_stable_decay", {"num_decay_steps": 3}),
    *(
        (
            "warmup_stable_decay",
            {
                "num_decay_steps": 5, "num_stable_steps": 2, "min_lr_ratio": 0.1, "num_cycles": 0.4,
                "warmup_type": rises, "decay_type": falls,
            },
        )
        for rises, falls in (("linear", "1-sqrt"), ("cosine", "linear"), ("1-sqrt", "cosine"))
    ),
]  # fmt: skip


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(("name", "arguments"), SCHEDULES)
def test_each_schedule_is_that_of_transformers(name, arguments, warmup):
    num_steps, peak = 13, 0.7
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    theirs: Any = get_scheduler(name, optimizer, warmup, num_steps, scheduler_specific_kwargs=dict(arguments))
    ours = learning_rate_factor(name, Span(peak, warmup, num_steps), arguments)
    for step in range(num_steps + 2):
        assert ours(step) == theirs.lr_lambdas[0](step), step


def test_each_name_has_a_schedule():
    names = get_args(TrainConfig.model_fields["lr_scheduler_type"].annotation)
    assert {name for name, _ in SCHEDULES} == set(names)


@pytest.mark.ci
def test_the_usual_schedules_load_no_heavy_package():
    code = """
import sys, torch
from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks
for name in ("linear", "cosine", "constant", "constant_with_warmup"):
    Optimizer(DDP(Ranks(), 1.0), torch.nn.Linear(2, 2), TrainConfig(lr_scheduler_type=name), 3)
print({"peft", "bitsandbytes"} & set(sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert found.stdout == "set()\n", found.stderr


@pytest.mark.parametrize("num_steps", [1, 7, 100, 1000])
@pytest.mark.parametrize("setting", [0, 0.001, 0.03, 0.1, 0.5, 0.999, 1, 1.7, 25])
def test_warm_up_is_rounded_like_transformers(setting, num_steps, tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), warmup_steps=setting, use_cpu=True)
    assert warmup_steps(float(setting), num_steps) == arguments.get_warmup_steps(num_steps)
