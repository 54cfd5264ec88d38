"""Where the parts of benchmarks/gpu.py run, and how they measure: synchronised seconds, peak memory, FLOP/s."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from benchmarks.common import PACKAGES, peak_growth
from rl_vlm.plan.hardware import CARDS


@dataclass(frozen=True)
class Bench:
    """A device, and whether the parts take their small form, which runs on a laptop in a minute."""

    device: torch.device
    small: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """Return the compute precision of runs."""
        return "bfloat16" if self.on_gpu else "float32"

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

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Return the most bytes of tensors on the GPU in a call; on a CPU, the growth of the resident size."""
        if not self.on_gpu:
            return peak_growth(run)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device)

    def utilization(self, flops: float, seconds: float) -> float | None:
        """Return the share of the card's dense bfloat16 peak; None if the peak is not known."""
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if self.on_gpu else None
        return flops / seconds / peak if peak else None

    def environment(self) -> dict[str, Any]:
        """Return the device and the versions."""
        card = torch.cuda.get_device_name(self.device) if self.on_gpu else f"CPU, {torch.get_num_threads()} threads"
        names = [*PACKAGES, "triton", "flash-attn"]
        return {
            "device": card,
            "dtype": self.dtype,
            "small": self.small,
            "versions": {"python": platform.python_version()} | {n: v for n in names if (v := version_of(n))},
        }


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 peak of a card by the name that CUDA has for it, or None if it is not known."""
    words = name.lower().replace("-", " ").split()
    found = [card for card in CARDS.values() if set(card.name.split("-")) <= set(words)]
    return max(found, key=lambda card: len(card.name)).flops if found else None
