"""Shared parts of the benchmarks: alternating timings, memory in a fresh process, versions and machine, tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rl_vlm.passes.peaks import CudaPeak

ROOT = Path(__file__).parents[1]
PACKAGES = "torch triton transformers trl peft accelerate flash-attn vllm".split()
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc returns tensors to the system as soon as they are freed, so that the resident size is the memory in use."""


def alternate(
    sides: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each call. The sides take turns for `repeats` rounds; callers warm up before."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], of: str, to: str) -> float:
    """Compute the median over rounds of `of` / `to` in the same round, so that drift of the machine's speed cancels."""
    return statistics.median(a / b for a, b in zip(seconds[of], seconds[to], strict=True))


def product_rate(device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Measure the FLOPs per second of a product of matrices of 1,024 x 1,024, or 8,192 x 8,192 on a GPU."""
    size = 1024 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def product() -> None:
        torch.matmul(matrix, matrix)
        wait()

    product()
    return 2 * size**3 / min(alternate({"product": product}, 20)["product"])


def peak_growth(run: Callable[[], Any]) -> int:
    """Return by how many bytes the peak resident size during `run` exceeds the resident size before it (Linux)."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    run()
    return _status("VmHWM") - before


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes of tensors on a GPU during `run`, weights included; on a CPU, what `peak_growth` does."""
    if device.type == "cpu":
        return peak_growth(run)
    peak = CudaPeak(device)
    peak.restart()
    run()
    return peak.read()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_fresh_process(script: str, arguments: Sequence[str]) -> Any:
    """Run `benchmarks/SCRIPT arguments`; return the JSON of its last line. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        env=os.environ | RETURN_FREED_MEMORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def command_line(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return the options that give `args` these values again. True is a flag, and False is left out."""
    options: list[str] = []
    for name in names:
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is True:
            options.append(option)
        elif value is not False:
            options += [option, str(value)]
    return options


def environment(device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    """Return the versions of Python and of the installed packages, and a description of the machine."""
    cpu = next(
        (line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")), platform.processor()
    )
    card = torch.cuda.get_device_name() if device == "cuda" else cpu
    threads = torch.get_num_threads()
    return {
        "versions": {"python": platform.python_version()} | {n: v for n in PACKAGES if (v := version_of(n))},
        "machine": {"cpu": card, "cores": os.cpu_count(), "threads": threads, "dtype": dtype, "device": device},
    }


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
