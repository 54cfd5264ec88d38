"""Distribution and the update: the only place that knows accelerate, and where ranks talk to each other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rl_vlm.config.schema import LogConfig, TrainConfig
from rl_vlm.errors import ConfigError, LaunchError, RLVLMError
from rl_vlm.policy import Policy

T = TypeVar("T")


class Engine:
    """One rank's handle on all ranks, and the optimizer behind the policy."""

    def __init__(self, output_dir: str, log: LogConfig) -> None:
        """Raises LaunchError when the processes that were launched are not those that accelerate sees."""
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.tracking import get_available_trackers

        trackers: list[Any] = [*log.report_to]
        installed = [str(tracker) for tracker in get_available_trackers()]
        if not set(trackers) <= set(installed):
            raise ConfigError(f"log.report_to: {trackers} are asked for, and the packages of {installed} are installed")

        # A micro-batch of text alone leaves the vision tower without gradients.
        ddp = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
        self.accelerator: Any = Accelerator(
            cpu=not torch.accelerator.is_available(),
            mixed_precision="no",
            log_with=trackers or None,
            project_dir=output_dir,
            kwargs_handlers=[ddp],
        )
        check_launch(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def prepare(self, policy: Policy, train: TrainConfig, num_steps: int) -> None:
        """Wrap the policy for training and make its optimizer and learning-rate schedule."""
        from transformers import get_scheduler

        self.policy = policy.to(self.device)
        self.optimizer = build_optimizer(policy, train)
        self.wrapped, self.prepared_optimizer = self.accelerator.prepare(policy, self.optimizer)
        warmup = train.warmup_steps if train.warmup_steps >= 1 else train.warmup_steps * num_steps
        self.scheduler = get_scheduler(
            train.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=round(warmup),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=train.lr_scheduler_kwargs,
        )

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around one micro-batch's forward and backward: ranks exchange gradients in the step's last one only."""
        with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradients. DDP averages over ranks, while losses are shares of a sum over ranks."""
        self.accelerator.backward(loss * self.world_size)

    def gradient_norm(self, max_norm: float) -> float:
        """The global norm before it is scaled down to `max_norm` (0: not scaled)."""
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        return float(self.accelerator.clip_grad_norm_(parameters, max_norm or float("inf")))

    def update(self) -> None:
        """One optimizer step."""
        self.prepared_optimizer.step()

    def advance_schedule(self) -> None:
        """The learning rate of the next step; it follows the step count, also past skipped updates."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    @property
    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.accelerator.reduce(tensor, reduction="sum").tolist()

    def max(self, values: Sequence[int]) -> list[int]:
        """Element-wise, the largest value of any rank."""
        ranks = self.accelerator.gather(torch.tensor([values], device=self.device))  # (ranks, values)
        return ranks.amax(dim=0).tolist()

    def gather(self, values: list[T]) -> list[T]:
        """The lists of all ranks behind each other, on every rank."""
        from accelerate.utils import gather_object

        return gather_object(values)

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if it fails on one, raise its error on all, so that none waits forever."""
        result, error = None, None
        try:
            result = action()
        except RLVLMError as failure:
            error = failure
        failed = [failure for failure in self.gather([error]) if failure is not None]
        if failed:
            raise failed[0]
        return cast(T, result)

    def start_trackers(self, run_name: str, settings: dict[str, dict[str, Any]]) -> None:
        """Open the trackers of `report_to`. They get the settings, by section and leaf, as flat numbers and texts."""
        flat = {f"{section}.{leaf}": value for section, leaves in settings.items() for leaf, value in leaves.items()}
        plain = {name: value if isinstance(value, int | float) else str(value) for name, value in flat.items()}
        self.accelerator.init_trackers(run_name, config=plain)

    def report(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics to the trackers."""
        self.accelerator.log(metrics, step=step)

    def close(self) -> None:
        self.accelerator.end_training()

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and schedule, for a checkpoint."""
        return {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def build_optimizer(policy: Policy, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable weights; biases and norms, which are vectors, are not decayed."""
    trainable = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
    )


def check_launch(seen: int) -> None:
    """Raises LaunchError unless `seen` is the number of processes that the launcher meant to start.

    `accelerate launch --cpu --num_processes 2` starts one process, with a rendezvous address and no world size.
    """
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        launched = "several"
    else:
        launched = os.environ.get("WORLD_SIZE", "1")
    if launched != str(seen):
        raise LaunchError(
            f"the launcher was asked for {launched} processes, but this one sees {seen} and would train alone. "
            "On CPUs use: accelerate launch --config_file launch/accelerate/cpu.yaml"
        )
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        raise LaunchError("the launcher asks for mixed precision; leave that to model.dtype: bfloat16")
