"""A program that every rank of a launch runs: it trains several configs, one after the other, in one process group.

accelerate launch --config_file … -m tests.helpers.train_all first.yaml second.yaml …
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from rl_vlm.config.load import load_config
from rl_vlm.distributed.launcher import end_with_launcher
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.run import train
from rl_vlm.trainer import Trainer

FAULT = "fault-"
"""A config file `fault-X.yaml` has a fault in its second step: the loss is multiplied by X, or X is `gradient`."""
CHECKED = "checked"
"""The engine of a config file of this name is compared with the policy, as engines with weights of their own are."""


def with_fault(kind: str) -> Any:
    """Return a patch with which the last rank's second step has a loss, or only a gradient, that is not finite."""
    loss = Trainer.loss

    def faulty_loss(trainer: Trainer, batch: Any, output: Any, *rest: Any) -> Any:
        is_faulty = trainer.progress.global_step == 1 and trainer.ranks.rank == trainer.ranks.world_size - 1
        if is_faulty and kind == "gradient":
            output.logprobs_NT.register_hook(lambda gradient: gradient * float("nan"))
        value, sums = loss(trainer, batch, output, *rest)
        return (value * float(kind) if is_faulty and kind != "gradient" else value), sums

    return mock.patch.object(Trainer, "loss", faulty_loss)


def with_check() -> Any:
    """Return a patch with which an engine is checked that samples from the policy itself."""

    def start_step(trainer: Trainer) -> None:
        trainer.engine_checked = trainer.progress.global_step > 0
        start(trainer)

    start = Trainer.start_step
    return mock.patch.object(Trainer, "start_step", start_step)


def train_file(path: Path) -> None:
    """Train the config of a file, with what its name says."""
    if path.stem.startswith(FAULT):
        patch = with_fault(path.stem.removeprefix(FAULT))
    else:
        patch = with_check() if path.stem == CHECKED else nullcontext()
    with patch:
        train(load_config(path))


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
