"""The optimizers of `train.optim`, against the libraries' own on the same gradients; their state; refusals."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor

from rl_vlm.config.schema import RunConfig, TrainConfig
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.optimizer_files import OptimizerFiles, load_optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.strategy import select_strategy
from rl_vlm.errors import ConfigError

BITSANDBYTES: Any = pytest.importorskip("bitsandbytes.optim", reason="needs bitsandbytes")
NUM_STEPS = 4
SETTINGS: dict[str, Any] = {
    "learning_rate": 0.01, "lr_scheduler_type": "constant", "weight_decay": 0.5, "max_grad_norm": 0.0,
    "adam_beta1": 0.5, "adam_beta2": 0.7, "adam_epsilon": 1e-3,
}  # fmt: skip
EXPECTED: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw_torch": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.5, 0.7), eps=1e-3),
    "adamw_8bit": lambda groups: BITSANDBYTES.AdamW8bit(groups, lr=0.01, betas=(0.5, 0.7), eps=1e-3),
    "adafactor": lambda groups: Adafactor(groups, lr=0.01, scale_parameter=False, relative_step=False),
}
"""Each optimizer as its library makes it."""


def make_model() -> nn.Sequential:
    """A matrix that is large enough to have 8-bit moments, 4,096 values, and vectors that are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(65, 70), nn.LayerNorm(70))


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def make_optimizer(model: nn.Module, optim: str) -> Optimizer:
    train = TrainConfig.model_validate(SETTINGS | {"optim": optim})
    return Optimizer(DDP(Ranks(), train.max_grad_norm), model, train, num_steps=10)


def update(optimizer: Optimizer, model: nn.Module, steps: Sequence[int]) -> list[Tensor]:
    for step in steps:
        set_gradients(model, step)
        optimizer.strategy.reserve_update()
        assert optimizer.strategy.update(loss_is_finite=True)[1]
        optimizer.strategy.clear_gradients()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("optim", EXPECTED)
def test_updates_are_those_of_the_library(optim: str) -> None:
    model = make_model()
    found = update(make_optimizer(model, optim), model, range(NUM_STEPS))
    expected = make_model()
    linear, norm = expected
    library = EXPECTED[optim](
        [
            {"params": [linear.weight], "weight_decay": 0.5},
            {"params": [linear.bias, norm.weight, norm.bias], "weight_decay": 0.0},
        ]
    )
    for step in range(NUM_STEPS):
        set_gradients(expected, step)
        library.step()
    for ours, theirs in zip(
        found, expected.parameters(), strict=True
    ):  # torch's loop and fused kernel round differently
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    (start, *_) = make_model().parameters()
    assert (found[0] - start).abs().mean() > 0.01


def test_the_optimizers_differ() -> None:
    models = {optim: make_model() for optim in EXPECTED}
    weights = {optim: update(make_optimizer(model, optim), model, [0, 1])[0] for optim, model in models.items()}
    for other in ("adamw_8bit", "adafactor"):
        assert (weights["adamw_torch"] - weights[other]).abs().max() > 1e-5


@pytest.mark.parametrize("optim", EXPECTED)
def test_a_loaded_state_continues_bitwise(optim: str, tmp_path) -> None:
    straight = make_model()
    expected = update(make_optimizer(straight, optim), straight, range(NUM_STEPS))
    model = make_model()
    first = make_optimizer(model, optim)
    update(first, model, range(2))
    OptimizerFiles(first, Ranks()).write(tmp_path)
    model = copy.deepcopy(model)
    second = make_optimizer(model, optim)
    load_optimizer(second, tmp_path)
    found = update(second, model, range(2, NUM_STEPS))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("optim", "bytes_per_value"),
    # AdamW: two floats. 8-bit: two bytes, and two floats per block of 256. Adafactor: a float per row and column.
    [("adamw_torch", 8), ("adamw_8bit", 2 + 2 * 4 / 256), ("adafactor", 4 * (256 + 512) / (256 * 512))],
)
def test_bytes_of_the_state(optim: str, bytes_per_value: float) -> None:
    model = nn.Linear(256, 512, bias=False)
    optimizer = make_optimizer(model, optim)
    update(optimizer, model, [0])
    (weight,) = model.parameters()
    state = optimizer.strategy.optimizer_state(weight)
    assert sum(t.nbytes for t in state.values() if t.ndim) == bytes_per_value * 256 * 512


def test_bitsandbytes_keeps_nothing_of_a_run() -> None:
    model = make_model()
    update(make_optimizer(model, "adamw_8bit"), model, [0])
    kept = vars(BITSANDBYTES.GlobalOptimManager.get_instance())
    assert not any(kept.values())


def test_without_bitsandbytes_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    train = {"prompts_per_step": 1, "optim": "adamw_8bit"}
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[bitsandbytes\]'"):
        select_strategy(Ranks(), RunConfig.model_validate({"model": {"model_name_or_path": "m"}, "train": train}))
