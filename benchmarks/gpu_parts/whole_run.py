"""Whole windows against TRL's trainer, on the digits task, as `benchmarks/whole_run.py` measures them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import whole_run
from benchmarks.common import version_of
from benchmarks.gpu_parts.bench import Bench
from benchmarks.whole_run_tables import window_median

HEAD = ("shape", "speedup", "memory_vs_trl", "window_s", "trl_window_s", "reward", "trl_reward")


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for the digits model; in the small form one for a toy. Nothing if TRL is not installed."""
    if version_of("trl") is None:
        return
    options = ["--small", "--windows", "2"] if bench.small else ["--shape", "digits", "--windows", "16"]
    found = whole_run.measure(whole_run.parse([*options, "--device", bench.device.type]))
    yield {
        "shape": found["workload"]["shape"],
        "speedup": found["speedup_vs_peer"],
        "memory_vs_trl": found["peak_memory_vs_peer"],
        "window_s": window_median(found, "ours"),
        "trl_window_s": window_median(found, "trl"),
        "reward": found["reward"]["ours"][-1],
        "trl_reward": found["reward"]["trl"][-1],
        "result": found,
    }
