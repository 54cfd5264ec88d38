"""Updates, against torch.optim.AdamW with its groups and its clipping written out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks

SETTINGS: dict[str, Any] = {
    "learning_rate": 0.1, "lr_scheduler_type": "constant", "weight_decay": 0.5, "max_grad_norm": 1.0,
    "adam_beta1": 0.5, "adam_beta2": 0.7, "adam_epsilon": 0.1,
}  # fmt: skip
GRADIENT_NORMS = [8.0, 0.5, 3.0]
"""Of three steps; clipping at 1 changes the first and the last."""


def make_model() -> nn.Module:
    """A weight, biases, and a norm whose weight has one dimension."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def gradients(model: nn.Module) -> list[list[Tensor]]:
    """Random gradients of each step, of GRADIENT_NORMS over all parameters."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for norm in GRADIENT_NORMS:
        random = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
        scale = norm / torch.cat([g.flatten() for g in random]).norm()
        steps.append([scale * g for g in random])
    return steps


def updated(**changed: Any) -> tuple[list[Tensor], list[float]]:
    """The weights after our optimizer's three updates, and the norms of the gradients."""
    model = make_model()
    train = TrainConfig(**SETTINGS | changed)
    strategy = DDP(Ranks(), train.max_grad_norm)
    optimizer = Optimizer(strategy, model, train, num_steps=3)
    norms = []
    for step in gradients(model):
        for parameter, gradient in zip(model.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        norm, is_updated = strategy.update(loss_is_finite=True)
        assert is_updated
        norms.append(norm)
        strategy.clear_gradients()
        optimizer.advance_schedule()
    return [p.detach() for p in model.parameters()], norms


def expected(
    betas: tuple[float, float] = (0.5, 0.7), decay: float = 0.5, decay_of_vectors: float = 0.0, max_norm: float = 1.0
) -> list[Tensor]:
    model: Any = copy.deepcopy(make_model())
    linear, norm = model
    adamw = torch.optim.AdamW(
        [
            {"params": [linear.weight], "weight_decay": decay},
            {"params": [linear.bias, norm.weight, norm.bias], "weight_decay": decay_of_vectors},
        ],
        lr=0.1, betas=betas, eps=0.1,
    )  # fmt: skip
    for step, total in zip(gradients(model), GRADIENT_NORMS, strict=True):
        for parameter, gradient in zip(model.parameters(), step, strict=True):
            parameter.grad = gradient * min(1.0, max_norm / total)
        adamw.step()
    return [p.detach() for p in model.parameters()]


def test_updates_are_those_of_adamw_on_clipped_gradients() -> None:
    weights, norms = updated()
    torch.testing.assert_close(weights, expected(), rtol=1e-5, atol=1e-6)
    assert norms == pytest.approx(GRADIENT_NORMS)  # before clipping


def test_a_max_grad_norm_of_0_does_not_clip() -> None:
    torch.testing.assert_close(updated(max_grad_norm=0.0)[0], expected(max_norm=1e9), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "wrong", [{"betas": (0.9, 0.999)}, {"decay": 0.0}, {"decay_of_vectors": 0.5}, {"max_norm": 1e9}], ids=str
)
def test_each_setting_changes_the_weights(wrong: dict[str, Any]) -> None:
    difference = max((w - e).abs().max().item() for w, e in zip(expected(**wrong), expected(), strict=True))
    assert difference > 1e-2
