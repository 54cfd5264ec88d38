"""Weights from the trainer's GPU to those of a vLLM server, by vLLM's own NCCL transfer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rl_vlm.generation import WeightSource
from rl_vlm.generation.vllm_client import VLLMClient
from rl_vlm.generation.vllm_process import free_port


class NCCLSender:
    """One server's connection; the first `send` sets it up."""

    def __init__(self, client: VLLMClient) -> None:
        self.client = client
        self.engine: Any = None

    def send(self, source: WeightSource) -> None:
        """Send all trained weights, and wait until the server has loaded them."""
        if self.engine is None:
            self.engine = self.connect(source)
        self.engine.send_weights()

    def connect(self, source: WeightSource) -> Any:
        """vLLM's sending side, as rank 0 of a group with the server's GPUs."""
        from vllm.distributed.weight_transfer.base import ParamMeta
        from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        class Weights(VLLMWeightSource):
            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return source.trained_weights()

        address = address_towards(self.client.url)
        world_size = 1 + self.client.get("/get_world_size")["world_size"]
        port = free_port(address)
        info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=world_size, rank=0)
        return WeightTransferTrainerFactory.trainer_init(info, client=Control(self.client), source=Weights())


class Control:
    """vLLM's `VLLMWeightSyncClient` over a client that has the token."""

    def __init__(self, client: VLLMClient) -> None:
        self.client = client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.client.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.client.post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.client.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.client.post("/finish_weight_update", {"weight_version": weight_version})


def address_towards(url: str) -> str:
    """The address of this machine's interface from which the server is reached."""
    host, port = url.split("//")[1].rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        probe.connect((host, int(port.rstrip("/"))))
        return probe.getsockname()[0]
