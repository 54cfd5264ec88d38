"""Where the parts of benchmarks/gpu.py run, and how they measure: synchronised seconds, peak memory, FLOP/s."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch

from rl_vlm.plan.hardware import CARDS

T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """A device, and whether the parts take their small form, which runs on a laptop in a minute."""

    device: torch.device
    small: bool
    deadline: float = math.inf
    """The `time.monotonic()` after which no row is begun."""
    rows: str = ""
    """A regular expression that the names of measured rows contain."""
    left_out: list[str] = field(default_factory=list)
    """Names of what was not begun."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """Return the compute precision of runs."""
        return "bfloat16" if self.on_gpu else "float32"

    def in_time(self, cases: Mapping[str, T]) -> Iterator[T]:
        """Yield the cases of `rows` until the deadline, and note the names of those after it."""
        for name, case in cases.items():
            if not re.search(self.rows, name):
                continue
            if time.monotonic() < self.deadline:
                yield case
            else:
                self.left_out.append(name)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds of one call, until the device has finished."""
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def median_seconds(self, run: Callable[[], Any], repeats: int = 5) -> float:
        """Return the median over calls, after one that is not counted."""
        run()
        return median(self.seconds(run) for _ in range(1 if self.small else repeats))

    def utilization(self, flops: float, seconds: float) -> float | None:
        """Return the share of the card's dense bfloat16 peak; None if the peak is not known."""
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if self.on_gpu else None
        return flops / seconds / peak if peak else None


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 peak of a card by the name that CUDA has for it, or None if it is not known."""
    words = name.lower().replace("-", " ").split()
    found = [card for card in CARDS.values() if set(card.name.split("-")) <= set(words)]
    return max(found, key=lambda card: len(card.name)).flops if found else None
