"""Ranks that are threads of this process, with torch's collectives between them: several ranks in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore, _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from rl_vlm.distributed.launch_variables import Launch
from rl_vlm.distributed.ranks import Ranks

T = TypeVar("T")
SECONDS = 120
"""Time for a call of `on_ranks`, after which ranks that wait for each other are ended."""


class ThreadedRanks(Ranks):
    """The view of one such rank."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    @property
    def rank(self) -> int:
        return distributed.get_rank()

    @property
    def world_size(self) -> int:
        return distributed.get_world_size()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def sum(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        self.all_reduce(tensor)
        return tensor.tolist()

    def max(self, values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(values)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return tensor.tolist()


def on_ranks(num_ranks: int, function: Callable[[Ranks], T], launch: Launch | None = None) -> list[T]:
    """Return what `function` returns on each rank. Raises the error of a rank that fails."""
    store = HashStore()

    def on_rank(rank: int) -> T:
        distributed.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
        try:
            return function(ThreadedRanks(launch or Launch("ddp")))
        except BaseException as error:
            threaded.ProcessLocalGroup.exception_handle(error)  # ends the others, which may wait for this one
            raise
        finally:
            distributed.destroy_process_group()

    with threads_as_ranks(), ThreadPoolExecutor(num_ranks) as pool:
        calls = [pool.submit(on_rank, rank) for rank in range(num_ranks)]
        if wait(calls, timeout=SECONDS).not_done:
            threaded.ProcessLocalGroup.exception_handle(TimeoutError())
    errors = [error for call in calls if (error := call.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, SystemExit)):  # SystemExit: ended by another rank
        raise error
    return [call.result() for call in calls]


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """Give each thread a process group of its own in the context."""
    threaded._install_threaded_pg()
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
