"""The tests of the GPU path, each model family in a process of its own. Without a GPU, FlexAttention's on a CPU.

A family that breaks the device's state does not fail the others. Outcomes are read while the tests run, so those before
a time limit are kept.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common import ROOT
from benchmarks.gpu_parts.bench import Bench

HEAD = ("tests", "passed", "failed", "skipped", "seconds", "note")
FAMILIES = {
    1: ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "paligemma"),
    2: ("paligemma2", "qwen3_vl_moe", "glm4v", "internvl", "llava_next", "lfm2_vl"),
}
"""Families of `tests/gpu/test_shared_attention.py`, in two parts of minutes each."""
ATTENTION, RUNS = "tests/gpu/test_shared_attention.py", "tests/gpu/test_runs.py"
ON_CPU = ["tests/unit/model/test_shared_prefix.py", "-k", "flex"]
OUTCOMES = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}
OUTCOME = re.compile(rf"^\S+::.* ({'|'.join(OUTCOMES)})\b")
"""A line of `pytest -v` that tells how a test ended."""


def measure(bench: Bench, half: int) -> Iterator[dict[str, Any]]:
    """Yield a row with the number of outcomes for each family, and in the first half for whole runs.

    Messages of failures go to the terminal. Raises RuntimeError at the end if a process of tests failed.
    """
    selected = {name: [ATTENTION, "-k", only(name)] for name in FAMILIES[half]}
    if half == 1:
        selected["whole runs"] = [RUNS]
    if not bench.on_gpu:
        selected = {"FlexAttention on a CPU": ON_CPU}
    failed = []
    for name in bench.in_time({name: name for name in selected}):
        row = {"tests": name} | run_tests(selected[name], bench.deadline)
        yield row
        if row["failed"] or row["note"]:
            failed.append(name)
    if failed:
        raise RuntimeError(f"tests failed: {', '.join(failed)}")


def only(family: str) -> str:
    """Return the expression that selects the tests of one family: names of others may contain its own."""
    others = (name for names in FAMILIES.values() for name in names)
    return " and not ".join([family, *(name for name in others if family in name and name != family)])


def run_tests(selected: Sequence[str], deadline: float) -> dict[str, Any]:
    """Run tests until the deadline, and count their outcomes. The compiler's debug lines are not shown."""
    command = [sys.executable, "-u", "-m", "pytest", "-v", "--tb=short", "--show-capture=no", *selected]
    outcomes: Counter[str] = Counter()
    start = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(min(deadline - start, threading.TIMEOUT_MAX), process.kill)
        limit.start()
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            if found := OUTCOME.match(line):
                outcomes[OUTCOMES[found[1]]] += 1
        status = process.wait()
        limit.cancel()
    note = None if status in (0, 1) else f"pytest ended with status {status}"
    if time.monotonic() >= deadline:
        note = "ended at the time limit"
    return {
        **{outcome: outcomes[outcome] for outcome in ("passed", "failed", "skipped")},
        "seconds": time.monotonic() - start,
        "note": note,
    }
