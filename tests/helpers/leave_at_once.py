"""Pairs of processes that end right after a collective. Exits with 1 if one aborts.

    python -m tests.helpers.leave_at_once NUM_PAIRS

The interpreter is not to change threads by itself, and each process is to stay on one CPU. A thread of gloo then often
frees the collective's tensors only when the interpreter ends.
"""

import os
import socket
import sys

import torch

from rl_vlm.distributed.ranks import Ranks

kept: list[object] = []
"""The process group, which DistributedDataParallel keeps beyond `Ranks.close`."""


def leave(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    ranks = Ranks()
    kept.append(torch.distributed.group.WORLD)
    ranks.sum([1.0])
    sys.setswitchinterval(1000)
    ranks.sum([1.0] * 300)
    ranks.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    torch.set_num_threads(1)
    aborted = 0
    for _ in range(int(sys.argv[1])):
        port, children = free_port(), []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                leave(rank, port)
                sys.exit(0)
            children.append(child)
        aborted += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    sys.exit(aborted > 0)


if __name__ == "__main__":
    main()
