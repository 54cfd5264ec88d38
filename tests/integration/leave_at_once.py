"""Pairs of processes that end right after a collective, or of which one is told to stop before they are joined.

    python -m tests.integration.leave_at_once NUM_PAIRS
    python -m tests.integration.leave_at_once NUM_PAIRS signalled

Exits with 1 if one of them ends with another status than 0, or 143 after the signal.

The interpreter is not to change threads by itself, and each process is to stay on one CPU. A thread of gloo then often
frees the collective's tensors only when the interpreter ends.
"""

import os
import signal
import sys

import torch

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.signals import handled
from rl_vlm.errors import Stopped
from tests.helpers.two_processes import free_port

kept: list[object] = []
"""The process group, which DistributedDataParallel keeps beyond `Ranks.close`."""


def launched_by_hand(rank: int, port: int) -> None:
    """Set what a launcher sets that keeps no store."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}


def leave() -> None:
    rank = int(os.environ["RANK"])
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    ranks = Ranks()
    kept.append(torch.distributed.group.WORLD)
    ranks.sum([1.0])
    sys.setswitchinterval(1000)
    ranks.sum([1.0] * 300)
    ranks.close()


def stop_one() -> None:
    """Join the processes, of which the second has got SIGTERM."""
    with handled(is_joining=True):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        Ranks()


def main() -> None:
    torch.set_num_threads(1)
    work, expected = (stop_one, 143) if "signalled" in sys.argv else (leave, 0)
    others = 0
    for _ in range(int(sys.argv[1])):
        port, children = free_port(), []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                launched_by_hand(rank, port)
                try:
                    work()
                except Stopped as stopped:
                    sys.exit(stopped.exit_status)
                sys.exit(0)
            children.append(child)
        others += sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != expected for child in children)
    sys.exit(others > 0)


if __name__ == "__main__":
    main()
