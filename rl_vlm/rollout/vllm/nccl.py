"""Weight transfer from the trainer's GPU to a vLLM server's GPUs with vLLM's NCCL backend.

NCCL waits forever for a lost server. The HTTP requests that accompany a transfer fail in bounded time.

send ─ thread ─► request: receive ─ NCCL ─► request: finish ─► outcome
                   └─ fails, though the thread may hang ─────► outcome, and the transfer is aborted
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import cached_property
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from rl_vlm.errors import RLVLMError
from rl_vlm.rollout.vllm.client import ServerLost, VLLMClient
from rl_vlm.rollout.vllm.process import free_port

GetWeights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Each call starts a new pass over the same weights."""


class NCCLSender:
    """The connection to one server. The first `send` sets it up."""

    def __init__(self, client: VLLMClient) -> None:
        self.client = client
        self.engine: Any = None
        self.weights: GetWeights = lambda: iter(())
        self.outcome: Queue[Exception | None] = Queue()

    def send(self, weights: GetWeights) -> None:
        """Send the weights, and wait until the server has loaded them.

        Raises ServerLost if the transfer fails; the connection is then unusable. Raises RolloutError if the server
        refuses a request.
        """
        self.weights = weights
        Thread(target=self.transfer, daemon=True).start()
        error = self.outcome.get()
        if error is not None:
            if self.engine is not None:
                self.engine.shutdown()  # abort NCCL's wait, which would keep the GPU busy
            raise error

    def transfer(self) -> None:
        """Run vLLM's sending side, which can wait forever, and report the outcome."""
        try:
            if self.engine is None:
                self.engine = self.connect()
            self.engine.send_weights()
            self.outcome.put(None)
        except RuntimeError as error:  # NCCL's
            self.outcome.put(ServerLost(f"The vLLM server {self.client.url} cannot be sent weights ({error})."))
        except Exception as error:
            self.outcome.put(error)

    def connect(self) -> Any:
        """Build vLLM's sending side, as rank 0 of a process group with the server's GPUs."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address = address_towards(self.client.url)
        world_size = 1 + self.client.get("/get_world_size")["world_size"]
        port = free_port(address)
        info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=world_size, rank=0)
        control = Control(self.client, failed=self.outcome.put)
        source = source_of(lambda: self.weights())  # of each transfer
        return WeightTransferTrainerFactory.trainer_init(info, client=control, source=source)


def source_of(weights: GetWeights) -> Any:
    """Build vLLM's `WeightSource` of the weights, whose names, types and shapes must not change."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    def described(source: WeightSource) -> list[ParamMeta]:
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in weights()]

    class SentWeights(WeightSource):
        """vLLM 0.33 reads a cached property and calls `iter_full`. vLLM 0.32 calls `metadata` and `__iter__`."""

        metadata: Any = cached_property(described) if isinstance(WeightSource.metadata, property) else described

        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            torch.cuda.synchronize()  # the transfer uses other streams, and the update may still be running
            for name, weight in weights():
                yield name, weight.cuda()

        __iter__ = iter_full

    return SentWeights()


class Control:
    """Implements vLLM's `VLLMWeightSyncClient` with requests that carry the token. `failed` receives their errors."""

    def __init__(self, client: VLLMClient, failed: Callable[[Exception], None]) -> None:
        self.client = client
        self.failed = failed

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        try:
            self.client.post(path, body)
        except RLVLMError as error:
            self.failed(error)
            raise

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post("/finish_weight_update", {"weight_version": weight_version})


def address_towards(url: str) -> str:
    """Return the address of this machine's interface from which the server is reached."""
    host, port = url.split("//")[1].rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
        probe.connect((host, int(port.rstrip("/"))))
        return probe.getsockname()[0]
