"""A program that every rank of a launch runs: it trains several configs, one after the other, in one process group.

accelerate launch --config_file … -m tests.helpers.train_all first.yaml second.yaml …
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rl_vlm.algorithm.losses import LossInputs, TokenLoss
from rl_vlm.config.load import load_config
from rl_vlm.distributed.launcher import end_with_launcher
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.model import shared_prefix
from rl_vlm.model.shared_prefix import shared_attention
from rl_vlm.rollout.agreement import AgreementCheck
from rl_vlm.run.run import train
from rl_vlm.tools.instruments import INSTRUMENTS
from rl_vlm.trainer import Trainer
from tests.helpers.changed_losses import changed_losses

FAULT = "fault-"
"""A config file `fault-X.yaml` has a fault in its second step: the loss is multiplied by X, or X is `gradient`."""
OUT_OF_MEMORY = "out-of-memory-"
"""In a config file `out-of-memory-X.yaml` the last rank runs out of memory in X, `forward` or `backward`, once in the
first step, if it can recover, and once in the second: in the first micro-batch that can be split."""
CHECKED = "checked"
"""The engine of a config file of this name is compared with the policy, as engines with weights of their own are."""
WRONG_ROWS = "wrong-rows"
"""In a config file of this name the last rank computes shared rows with another scale of attention."""


def with_fault(kind: str) -> Any:
    """Return a patch with which the last rank's second step has a loss, or only a gradient, that is not finite."""

    def faulty_loss(trainer: Trainer, loss: TokenLoss, ratio_NK: Tensor, inputs: LossInputs, algorithm: Any) -> Any:
        is_faulty = trainer.progress.global_step == 1 and trainer.ranks.rank == trainer.ranks.world_size - 1
        if is_faulty and kind == "gradient":
            inputs.policy_logprobs_NT.register_hook(lambda gradient: gradient * float("nan"))
        value_NK, flags = loss(ratio_NK, inputs, algorithm)
        return (value_NK * float(kind) if is_faulty and kind != "gradient" else value_NK), flags

    return changed_losses(faulty_loss)


def with_check() -> Any:
    """Return a patch with which an engine is checked that samples from the policy itself."""

    return mock.patch.object(AgreementCheck, "is_due", lambda check, progress: progress.global_step == 0)


def out_of_memory(kind: str) -> Any:
    """Return a patch with which the last rank runs out of memory in the first two steps, or in the second."""
    calls = Counter()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    def failing_loss(trainer: Trainer, loss: TokenLoss, ratio_NK: Tensor, inputs: LossInputs, algorithm: Any) -> Any:
        step = trainer.progress.global_step
        may_fail = step < 2 and (step == 1 or not trainer.optimizer.strategy.is_sharded)
        if may_fail and trainer.ranks.rank == trainer.ranks.world_size - 1 and len(inputs.mask_NT) > 1:
            calls[step] += 1
            if calls[step] == 1:
                fail() if kind == "forward" else inputs.policy_logprobs_NT.register_hook(fail)
        return loss(ratio_NK, inputs, algorithm)

    return changed_losses(failing_loss)


def with_wrong_rows() -> Any:
    """Return a patch with which the last rank's attention over shared rows has twice its scale."""

    def wrong(query: Tensor, key: Tensor, value: Tensor, layout: Any, scale: float, *softcap: Any) -> Tensor:
        is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return shared_attention(query, key, value, layout, scale * (1 + is_last), *softcap)

    return mock.patch.object(shared_prefix, "shared_attention", wrong)


def train_file(path: Path) -> None:
    """Train the config of a file, with what its name says."""
    if path.stem.startswith(FAULT):
        patch = with_fault(path.stem.removeprefix(FAULT))
    elif path.stem.startswith(OUT_OF_MEMORY):
        patch = out_of_memory(path.stem.removeprefix(OUT_OF_MEMORY))
    else:
        patches = {CHECKED: with_check, WRONG_ROWS: with_wrong_rows}
        patch = patches.get(path.stem, nullcontext)()
    with patch:
        train(load_config(path), INSTRUMENTS)


def main() -> None:
    end_with_launcher()
    launched = dict(os.environ)
    with mock.patch.object(Ranks, "close"):  # which would leave the process group
        for path in sys.argv[1:]:
            os.environ.clear()
            os.environ.update(launched)  # a run removes the launcher's request
            train_file(Path(path))


if __name__ == "__main__":
    main()
