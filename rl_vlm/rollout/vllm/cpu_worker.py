"""vLLM's worker for CPUs, when ranks share a model."""

from __future__ import annotations

import secrets
from pathlib import Path

from torch import distributed
from vllm.v1.worker.cpu_worker import CPUWorker

SHARED_MEMORY = Path("/dev/shm")


class SharedCPUWorker(CPUWorker):
    """Leave no named shared memory, and need no name that another run has.

    vLLM derives the name from the address at which the workers met. With a launcher, it is `env://` in every run. vLLM
    does not start if the name exists: during another run, or after a run that was killed.
    """

    def init_device(self) -> None:
        """Start the worker with a name that rank 0 draws. Every rank must call it."""
        name = [secrets.token_hex(8)]
        distributed.broadcast_object_list(name)
        self.distributed_init_method += name[0]
        super().init_device()
        distributed.barrier()  # every worker has opened the memory and no longer needs its name
        for path in SHARED_MEMORY.glob(f"{name[0]}*"):
            path.unlink(missing_ok=True)
