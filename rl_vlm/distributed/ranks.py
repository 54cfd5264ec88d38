"""Communication between the processes of a run."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import DistError

from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.launch_variables import kept_request, take_launch
from rl_vlm.distributed.launcher import check_variables, is_one_of_several
from rl_vlm.distributed.meeting_point import connect, init_method
from rl_vlm.distributed.sign_of_life import mark_alive
from rl_vlm.distributed.signals import stop
from rl_vlm.distributed.watch import LEAVE_SECONDS, Watch, waiting_for_all, watch_ranks
from rl_vlm.errors import LaunchError, RLVLMError

T = TypeVar("T")

SECONDS_TO_FREE = 0.2
"""Time for gloo's threads to free the tensors of the last collective, for which they need Python's lock.

If the interpreter ends before they have it, the process is aborted: "terminate called without an active exception".
"""


class Ranks(Collectives):
    """One process's view of all processes, numbered by rank. A run on one process has a single rank."""

    stays_joined = False
    """Whether the process group outlives this object."""
    num_joined = 0
    """Number of times that these processes have been joined."""
    watch: Watch | None = None
    """Watches the other ranks, if there are any."""

    def __init__(self, train: TrainConfig | None = None) -> None:
        """Join the processes that the launcher started, with the time limits of `train`, or the defaults.

        Raises LaunchError if accelerate sees another number of processes, if the launcher asks for something without
        effect, or if its variables do not fit together.
        """
        from accelerate import Accelerator, InitProcessGroupKwargs

        train = train or TrainConfig()
        check_variables()
        self.launch = take_launch()
        check_devices(torch.accelerator.device_count())

        Ranks.num_joined += 1
        self.watch = watch_ranks(Ranks.num_joined, train.lost_rank_seconds, train.ddp_timeout)
        limit = timedelta(seconds=train.ddp_timeout)
        try:
            if self.watch:
                self.watch.join()
            self.accelerator: Any = Accelerator(
                cpu=not torch.accelerator.is_available(),
                mixed_precision="no",
                kwargs_handlers=[InitProcessGroupKwargs(init_method=init_method(), timeout=limit)],
            )
            check_launch(self.world_size)
            stop.end_joining()
        except BaseException:
            self.close()
            raise

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

    def sum(self, values: Sequence[float]) -> list[float]:
        mark_alive()
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.accelerator.reduce(tensor, reduction="sum").tolist()

    def max(self, values: Sequence[int]) -> list[int]:
        mark_alive()
        ranks = self.accelerator.gather(torch.tensor([values], device=self.device))  # (ranks, values)
        return ranks.amax(dim=0).tolist()

    def gather(self, values: list[T]) -> list[T]:
        from accelerate.utils import gather_object

        mark_alive()
        return gather_object(values)

    @contextmanager
    def agree(self) -> Iterator[None]:
        error = None
        try:
            yield
        except RLVLMError as failure:
            error = failure
        if self.watch:
            self.watch.meet()
        for failure in self.gather([error]):
            if failure is not None:
                failure.on_all_ranks = True
                raise failure

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.world_size > 1:
            torch.distributed.broadcast(tensor, src=0)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)

    def failures_shared(self) -> AbstractContextManager[None]:
        """Show the other ranks an error that only this rank raises in the block. Raise RankLost if a rank is lost."""
        return self.watch.failures_shared() if self.watch else nullcontext()

    def close(self) -> None:
        """Stop watching, and leave the process group. Within `stay_joined`, leave it only when the process exits."""
        if self.watch:
            self.watch.leave()
        if not Ranks.stays_joined:
            leave_group()
        elif torch.distributed.is_initialized():
            atexit.unregister(leave_group)
            atexit.register(leave_group)


@contextmanager
def joined(train: TrainConfig) -> Iterator[Ranks]:
    """Join the processes for the block, as `Ranks` does, and leave them even if it fails.

    Otherwise this rank would still watch and be watched while its interpreter shuts down.
    """
    with closing(Ranks(train)) as ranks, ranks.failures_shared():
        yield ranks


@contextmanager
def stay_joined() -> Iterator[None]:
    """Keep the process group and the launcher's request after the block, for another run in the same processes."""
    with kept_request():
        Ranks.stays_joined = True
        try:
            yield
        finally:
            Ranks.stays_joined = False


def leave_group() -> None:
    """Leave the process group, if there is one."""
    from accelerate import PartialState

    if torch.distributed.is_initialized():
        PartialState().destroy_process_group()
        time.sleep(SECONDS_TO_FREE)


def refuse_together() -> None:
    """Wait for the other processes to refuse as well, if this one refused to start before they were joined.

    The launcher ends all other processes when the first one has ended.
    """
    if not Ranks.num_joined and is_one_of_several():
        with suppress(DistError):  # there is no store: nobody to wait for
            store = connect("refused", timedelta(seconds=LEAVE_SECONDS))
            for _ in waiting_for_all(store, "refused", int(os.environ["WORLD_SIZE"]), LEAVE_SECONDS):
                pass


def check_launch(seen: int) -> None:
    """Raise LaunchError if the launcher asked for another number of processes than `seen`.

    `accelerate launch --cpu --num_processes 2` starts one process, with a rendezvous address and no world size.
    """
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        launched = "several"
    else:
        launched = os.environ.get("WORLD_SIZE", "1")
    if launched != str(seen):
        raise LaunchError(
            f"the launcher was asked for {launched} processes, but this one sees {seen} and would train alone. "
            "On CPUs, use `accelerate launch --config_file launch/accelerate/cpu.yaml`, without --cpu. For another "
            "file of that folder, set ACCELERATE_USE_CPU=true before the command"
        )


def check_devices(num_devices: int) -> None:
    """Raise LaunchError if this machine has devices, but fewer than its processes."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < num_devices < processes:
        raise LaunchError(
            f"the launcher started {processes} processes on this machine, which has {num_devices} devices: set "
            f"--num_processes to {num_devices}, or to the number of devices of all machines"
        )
