"""A training run with a NaN in every second step: `-m tests.integration.injected_nan CONFIG`.

The step's number alone decides where: what becomes NaN, on which rank, in which micro-batch, at which position. Each
rank writes a line per step, with what it injected and whether its weights changed, to OUTPUT_DIR/injected_RANK.jsonl.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from launch import cli
from rl_vlm.algorithm.losses import LossInputs, TokenLoss, importance_ratio
from rl_vlm.config.schema import AlgorithmConfig
from rl_vlm.trainer import Trainer
from tests.helpers.changed_losses import changed_losses
from tests.helpers.tiny_run import token_sum

NAN = float("nan")
KINDS = ("loss", "gradient", "advantage", "logprob", "reward")
"""What becomes NaN. A `reward` is what a reward function returns, and an `advantage` is one behind the checks of it."""


@dataclass
class Injection:
    """The NaN of one step."""

    step: int
    is_done: bool = False

    def __post_init__(self) -> None:
        self.draw = random.Random(self.step)
        self.kind = KINDS[self.step // 2 % len(KINDS)] if self.step % 2 == 0 else None
        self.rank = self.draw.randrange(2)
        self.calls_before = self.draw.randrange(2)

    def is_due(self, *kinds: str) -> bool:
        """Return whether it is now, and count the calls of a rank's micro-batches."""
        if self.kind not in kinds or self.is_done or os.environ["RANK"] != str(self.rank):
            return False
        self.calls_before -= 1
        return self.calls_before < 0


current = Injection(1)


def token_sum_or_nan(completion_ids: list[list[int]], trainer_state: Any) -> list[float]:
    """Score as `token_sum`, but for a completion whose score is to be NaN."""
    scores = token_sum(completion_ids)
    if trainer_state.max_steps and current.is_due("reward"):
        scores[current.draw.randrange(len(scores))] = NAN
        current.is_done = True
    return scores


def with_nan(values: Tensor, where: Tensor) -> Tensor:
    """Return a copy with NaN at one of the places that are true."""
    places = where.nonzero()
    place = tuple(places[current.draw.randrange(len(places))].tolist())
    values = values.clone()
    values[place] = NAN
    return values


original_step = Trainer.step


def loss(
    trainer: Trainer, token_loss: TokenLoss, ratio_NK: Tensor, inputs: LossInputs, algorithm: AlgorithmConfig
) -> Any:
    """Compute the loss of a micro-batch, with a NaN before or in it if that is due."""
    if not current.is_due("loss", "advantage", "logprob"):
        return token_loss(ratio_NK, inputs, algorithm)
    current.is_done = True
    if current.kind == "logprob":
        inputs = replace(inputs, policy_logprobs_NT=with_nan(inputs.policy_logprobs_NT, inputs.mask_NT))
        ratio_NK = importance_ratio(inputs, algorithm.importance_sampling_level)
    if current.kind == "advantage":
        trained_N1 = inputs.mask_NT.any(dim=1, keepdim=True)
        inputs = replace(inputs, advantages_NK=with_nan(inputs.advantages_NK, trained_N1))
    value_NK, flags = token_loss(ratio_NK, inputs, algorithm)
    return value_NK * (NAN if current.kind == "loss" else 1.0), flags


def inject_gradient(trainer: Trainer) -> None:
    """Put NaN into one place of this rank's gradients."""
    gradients = [p.grad for p in trainer.policy.parameters() if p.grad is not None]
    local: list[Tensor] = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
    chosen = current.draw.choice([gradient for gradient in local if gradient.numel()])
    chosen.view(-1)[current.draw.randrange(chosen.numel())] = NAN
    current.is_done = True


def step(trainer: Trainer) -> Any:
    """Take a step, and note whether the weights changed."""
    global current
    current = Injection(trainer.progress.global_step + 1)
    strategy = trainer.optimizer.strategy
    update = type(strategy).update

    def updated(loss_is_finite: bool) -> tuple[float, bool]:
        if current.kind == "gradient" and os.environ["RANK"] == str(current.rank):
            inject_gradient(trainer)
        return update(strategy, loss_is_finite)

    strategy.update = updated
    weights = [getattr(p, "_local_tensor", p).detach() for p in trainer.policy.parameters()]
    before = [weight.clone() for weight in weights]
    metrics = original_step(trainer)
    line = {
        "step": current.step, "kind": current.kind, "is_done": current.is_done,
        "is_finite": all(weight.isfinite().all().item() for weight in weights),
        "changed": any(not torch.equal(old, new) for old, new in zip(before, weights, strict=True)),
    }  # fmt: skip
    with open(os.path.join(trainer.config.train.output_dir, f"injected_{os.environ['RANK']}.jsonl"), "a") as file:
        file.write(json.dumps(line) + "\n")
    return metrics


def main() -> int:
    patched: Any = Trainer
    patched.step = step
    with changed_losses(loss):
        return cli.run("train", sys.argv[1:])


if __name__ == "__main__":
    from tests.integration import injected_nan  # the module from which the run takes its reward function

    cli.end_process_after(injected_nan.main)
