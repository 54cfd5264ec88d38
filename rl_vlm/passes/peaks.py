"""The most memory that this process has held since a moment: as CUDA's allocator counts it, or as Linux does."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from rl_vlm.errors import ConfigError

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


@runtime_checkable
class Peak(Protocol):
    """A counter of the largest number of bytes."""

    meaning: str
    """What the bytes are."""

    def restart(self) -> None:
        """Begin from what is held now."""
        ...

    def read(self) -> int:
        """Return the most bytes since `restart`."""
        ...


class CudaPeak:
    """Tensors on a GPU."""

    meaning = "tensors on the GPU, by PyTorch's allocator"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


class ResidentPeak:
    """The process's resident memory. The kernel counts its peak, so nothing is missed."""

    meaning = "growth of the process's resident memory"

    def __init__(self) -> None:
        """Raise ConfigError if the system does not count it."""
        if not CLEAR_REFS.exists():
            raise ConfigError(f"log.memory_profile: on a CPU it needs Linux, which counts memory in {CLEAR_REFS}")

    def restart(self) -> None:
        """Return freed memory to the system, which counts as resident otherwise, and begin from the rest."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)
        CLEAR_REFS.write_text(RESET_PEAK)

    def read(self) -> int:
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return 1024 * int(fields["VmHWM"].split()[0])


def peak_of(device: torch.device) -> Peak:
    """Return the counter for a rank's device."""
    return CudaPeak(device) if device.type == "cuda" else ResidentPeak()


def held_gib() -> float:
    """Return the GiB that this process holds: PyTorch's reserve on a GPU, else its largest resident memory so far."""
    if torch.cuda.is_available():
        return torch.cuda.memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def allocated_bytes() -> int:
    """Return the bytes of tensors on the current GPU; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
