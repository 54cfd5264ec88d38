"""Runs whose token losses are changed or recorded: the table of losses is patched, and the trainer is as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from rl_vlm.algorithm.losses import Denominators, LossInputs, TokenLoss, TokenWeights
from rl_vlm.algorithm.objective import LOSS_FORMS
from rl_vlm.config.schema import AlgorithmConfig
from rl_vlm.trainer import Trainer

ChangedLoss = Callable[
    [Trainer, TokenLoss, Tensor, LossInputs, AlgorithmConfig],
    tuple[Tensor, dict[str, Tensor]],
]
"""(trainer, loss, *what the loss is given) -> what it returns instead."""


@contextmanager
def changed_losses(changed: ChangedLoss) -> Iterator[None]:
    """Call `changed` in place of every token loss, for a block."""
    trainers: list[Trainer] = []
    start_step = Trainer.start_step

    def noting(trainer: Trainer) -> None:
        trainers[:] = [trainer]
        start_step(trainer)

    def change(token_loss: TokenLoss) -> TokenLoss:
        return lambda *given: changed(trainers[-1], token_loss, *given)

    forms = {name: (change(token_loss), weights) for name, (token_loss, weights) in LOSS_FORMS.items()}
    with mock.patch.dict(LOSS_FORMS, forms), mock.patch.object(Trainer, "start_step", noting):
        yield


@dataclass
class Recorded:
    """What the losses of a block were given, by micro-batch."""

    inputs: list[LossInputs] = field(default_factory=list)
    denominators: list[Denominators] = field(default_factory=list)


@contextmanager
def recorded_losses() -> Iterator[Recorded]:
    """Record what every loss of a block is given."""
    recorded = Recorded()

    def noting_loss(token_loss: TokenLoss) -> TokenLoss:
        def noting(ratio_NK: Tensor, inputs: LossInputs, algorithm: AlgorithmConfig) -> Any:
            recorded.inputs.append(inputs)
            return token_loss(ratio_NK, inputs, algorithm)

        return noting

    def noting_weights(token_weights: TokenWeights) -> TokenWeights:
        def noting(mask_NT: Tensor, denominators: Denominators, max_completion_length: int) -> Tensor:
            recorded.denominators.append(denominators)
            return token_weights(mask_NT, denominators, max_completion_length)

        return noting

    forms = {name: (noting_loss(token_loss), noting_weights(w)) for name, (token_loss, w) in LOSS_FORMS.items()}
    with mock.patch.dict(LOSS_FORMS, forms):
        yield recorded
