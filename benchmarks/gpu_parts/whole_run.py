"""Whole windows against TRL's trainer, on the digits task, as `benchmarks/whole_run.py` measures them."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks import whole_run
from benchmarks.gpu_parts.bench import Bench, version_of

HEAD = ("shape", "speedup", "memory_vs_trl", "window_s", "trl_window_s", "reward", "trl_reward")


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for the digits model; in the small form one for a toy. Nothing if TRL is not installed."""
    if version_of("trl") is None:
        return
    options = ["--small", "--windows", "2"] if bench.small else ["--shape", "digits", "--windows", "16"]
    found = whole_run.measure(whole_run.parse([*options, "--device", bench.device.type]))
    seconds = {name: [sum(stages.values()) for stages in windows] for name, windows in found["seconds"].items()}
    yield {
        "shape": found["workload"]["shape"],
        "speedup": found["speedup_vs_peer"],
        "memory_vs_trl": found["peak_memory_vs_peer"],
        "window_s": median(seconds["ours"]),
        "trl_window_s": median(seconds["trl"]),
        "reward": found["reward"]["ours"][-1],
        "trl_reward": found["reward"]["trl"][-1],
        "result": found,
    }
