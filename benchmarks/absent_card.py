"""A CUDA card that is not there: enough of it for Inductor and Triton to compile kernels.

Inductor asks torch for the properties of the device and chooses tiles by them. Triton asks its driver for the target.
Nothing can be launched. Both cache their answers, so a process can have one card only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Card:
    """The properties of a card that choose its kernels, from NVIDIA's tables of compute capabilities."""

    name: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    """Bytes that a block may have."""


CARDS = {
    "a100": Card("A100", (8, 0), 108, 166_912),
    "3090": Card("RTX 3090", (8, 6), 82, 101_376),
    "4090": Card("RTX 4090", (8, 9), 128, 101_376),
    "h100": Card("H100", (9, 0), 132, 232_448),
    "b200": Card("B200", (10, 0), 148, 232_448),
    "5090": Card("RTX 5090", (12, 0), 170, 101_376),
}


@contextmanager
def standing_in(card: Card) -> Iterator[None]:
    """Let torch and Triton find this card, and no other, inside of the block."""
    properties = SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.processors,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2_048 if card.capability in {(8, 0), (9, 0), (10, 0)} else 1_536,
        max_threads_per_block=1_024,
        warp_size=32,
        shared_memory_per_block_optin=card.shared_memory,
        gcnArchName="",
    )
    capability = 10 * card.capability[0] + card.capability[1]
    functions: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "_exchange_device": lambda device: 0,
            "_maybe_exchange_device": lambda device: 0,
            "get_device_capability": lambda device=None: card.capability,
            "get_device_properties": lambda device=None: properties,
        },
        torch._C: {"_cuda_getCurrentRawStream": lambda device: 0},
        CudaInterface: {"get_device_properties": staticmethod(lambda device=None: properties)},
        scheduler: {"has_triton": lambda: True},
        triton_helpers: {"set_driver_to_gpu": lambda: None},
        triton.runtime.driver: {"_active": Driver(capability)},
    }
    with ExitStack() as patches:
        for target, replaced in functions.items():
            for name, function in replaced.items():
                patches.enter_context(mock.patch.object(target, name, function))
        yield


class Driver:
    """Triton's driver of the card."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def is_active(self) -> bool:
        return True
