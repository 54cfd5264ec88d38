"""What every benchmark needs: alternating timings, memory of a fresh process, and results with what they ran on."""

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
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks"
PACKAGES = "torch transformers trl peft accelerate".split()
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc gives tensors back to the system as soon as they are freed, so that the resident size is what is in use."""


def alternate(sides: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, one side after the other, `repeats` rounds; callers warm up before."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], of: str, to: str) -> float:
    """Median over the rounds of `of` / `to` in the same round, which a drift of the machine's speed leaves alone."""
    return statistics.median(a / b for a, b in zip(seconds[of], seconds[to], strict=True))


def peak_growth(run: Callable[[], Any]) -> int:
    """Bytes by which the resident size at its peak during `run` exceeds that before it (Linux)."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_fresh_process(script: str, arguments: Sequence[str]) -> Any:
    """The JSON that `benchmarks/SCRIPT arguments` prints as its last line. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        env=os.environ | RETURN_FREED_MEMORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, Any]:
    """Versions of what was measured, and the machine."""
    import torch

    cpu = next(
        (line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")), platform.processor()
    )
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "machine": {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "dtype": "float32"},
    }


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def result_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--docs", metavar="NAME", help="keep it as docs/benchmarks/NAME.json and redraw the page")


def finish(result: dict[str, Any], table: str, arguments: argparse.Namespace) -> None:
    """Print the table, write the JSON, redraw the page of the documentation."""
    from benchmarks.report import update_page

    print(table)
    text = json.dumps(result, indent=1) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
    if arguments.docs:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{arguments.docs}.json").write_text(text)
        update_page()


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
