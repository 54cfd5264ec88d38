"""The tests of the GPU path. Without a GPU, those of FlexAttention's forward on a CPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common import ROOT
from benchmarks.gpu_parts.bench import Bench

HEAD = ("test", "passed", "failed", "skipped")
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Run the tests, and yield the outcomes of each test function. Messages of failures go to the terminal.

    Raises subprocess.TimeoutExpired if they do not end before the deadline, and RuntimeError if pytest itself fails.
    """
    selected = ["tests/gpu"] if bench.on_gpu else ["tests/unit/model/test_shared_prefix.py", "-k", "flex"]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *selected, f"--junit-xml={report}"]
        longest = bench.deadline - time.monotonic()
        status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False, timeout=longest).returncode
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {status} and wrote no report")
        cases = list(ElementTree.parse(report).iter("testcase"))
    counts: dict[str, dict[str, int]] = {}
    for case in cases:
        name = case.get("name", "").partition("[")[0]
        outcome = next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")
        of_test = counts.setdefault(name, dict.fromkeys(HEAD[1:], 0))
        of_test[outcome] += 1
    yield from ({"test": name, **found} for name, found in counts.items())
