"""What a GPU proves and measures, in parts. Each part runs in a process of its own, under the allocator of runs.

    python benchmarks/gpu.py                          every part, one after the other
    python benchmarks/gpu.py training_3b memory       some of them
    python benchmarks/gpu.py --device cpu --small     every part in its small form, on any machine
    python benchmarks/gpu.py --json DIRECTORY         write DIRECTORY/PART.json as soon as a part has measured something
    python benchmarks/gpu.py --seconds 480            begin no row of a part after this time, and name those left out
    python benchmarks/gpu.py --rows 'G 8.* 800' training_3b    measure only rows whose names contain this

A part that fails keeps what it has measured, and the next one runs. The exit status is then 1.

`docs/gpu_benchmarks.md` describes the parts, their packages, and how to send the figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch

from benchmarks.common import environment, markdown_table
from benchmarks.flops import Training
from benchmarks.gpu_parts.bench import Bench
from rl_vlm.passes.allocator import EXPANDABLE, VARIABLES

RECOMPUTED = Training(gradient_checkpointing=True)
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "correctness_1": ("correctness", {"half": 1}),
    "correctness_2": ("correctness", {"half": 2}),
    "vllm_lora": ("vllm_engine", {"lora_r": 32}),
    "vllm_full": ("vllm_engine", {"lora_r": 0}),
    "training_3b": ("training_pass", {"model": "3b", "training": Training()}),
    "training_3b_checkpointing": ("training_pass", {"model": "3b", "training": RECOMPUTED}),
    "training_3b_lora": ("training_pass", {"model": "3b", "training": replace(RECOMPUTED, lora_r=32)}),
    "training_7b": ("training_pass", {"model": "7b", "training": Training(lora_r=16)}),
    "step_parts": ("step_parts", {}),
    "attention": ("attention", {}),
    "rollouts": ("rollouts", {}),
    "digits": ("digits", {}),
    "whole_run": ("whole_run", {}),
    "memory": ("memory", {}),
    "memory_expandable": ("memory", {}),
}
"""A module of `benchmarks/gpu_parts` for each part, and its options. The module has a HEAD, the columns of its table,
and `measure`, which yields the rows."""
ALLOCATOR = {"memory": "expandable_segments:False"}
"""Settings of the allocator, for parts that do not have those of runs."""
GRACE_S = 120.0
"""Seconds beyond twice the time of a part, after which its process is ended."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; all if none is given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small models and few repeats")
    parser.add_argument("--json", type=Path, metavar="DIRECTORY")
    parser.add_argument("--seconds", type=float, default=480, help="begin no row of a part after this time")
    parser.add_argument("--rows", default="", metavar="REGEX", help="measure only rows whose names contain this")
    parser.add_argument("--this-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        re.compile(args.rows)
    except re.error as error:
        parser.error(f"--rows {args.rows}: {error}")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return args


def run_part(name: str, bench: Bench, directory: Path) -> dict[str, Any]:
    """Measure one part in this process, and write its result after every row. An error becomes part of it."""
    module, options = PARTS[name]
    start = time.monotonic()
    result: dict[str, Any] = {
        "benchmark": f"gpu_{name}",
        **environment(bench.device.type, bench.dtype),
        "small": bench.small,
        "head": [],
        "rows": [],
    }
    try:
        part = importlib.import_module(f"benchmarks.gpu_parts.{module}")
        result["head"] = list(part.HEAD)
        for row in part.measure(bench, **options):
            print(json.dumps(row), file=sys.stderr, flush=True)
            result["rows"].append(row)
            write(result, name, directory)
    except Exception as error:
        traceback.print_exc()
        result["error"] = repr(error)
    result |= {"seconds": time.monotonic() - start, "left_out": bench.left_out}
    if bench.rows:
        result["selected"] = bench.rows
        if not result["rows"] and not bench.left_out:
            result.setdefault("error", f"no row has a name that contains {bench.rows}")
    write(result, name, directory)
    return result


def write(result: dict[str, Any], name: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def run_apart(name: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Measure one part in a process of its own, and return its result. A row that takes too long ends the process."""
    path = directory / f"{name}.json"
    path.unlink(missing_ok=True)
    longest = 2 * args.seconds + GRACE_S
    with subprocess.Popen(command(name, args, directory), env=variables(name, args), start_new_session=True) as process:
        try:
            status = process.wait(longest)
            error = f"its process ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            error = f"its process was ended after {longest:.0f} s"
        finally:  # and the processes that it has started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    result = json.loads(path.read_text()) if path.exists() else {"benchmark": f"gpu_{name}", "head": [], "rows": []}
    if error is not None:
        result["error"] = error
        write(result, name, directory)
    return result


def command(name: str, args: argparse.Namespace, directory: Path) -> list[str]:
    """Return the command that measures one part."""
    options = ["--device", args.device, "--seconds", str(args.seconds), "--json", str(directory), "--rows", args.rows]
    return [sys.executable, __file__, name, "--this-process", *options, *(["--small"] if args.small else [])]


def variables(name: str, args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a part: PyTorch reads it when it is imported."""
    found = os.environ | dict.fromkeys(VARIABLES, ALLOCATOR.get(name, EXPANDABLE))
    return found | ({"CUDA_VISIBLE_DEVICES": ""} if torch.device(args.device).type == "cpu" else {})


def report(name: str, result: dict[str, Any]) -> str:
    """Format the table of a part, what it left out, and its error."""
    lines = [f"\n## {name}", "", table(result["head"], result["rows"])]
    if "seconds" in result:
        lines += ["", f"{result['seconds']:.0f} s"]
    if left_out := result.get("left_out"):
        lines.append(f"left out for lack of time: {'; '.join(left_out)}")
    if "error" in result:
        lines.append(f"failed: {result['error']}")
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Format the columns `head` of the rows. A value that a row does not have is left empty."""
    return markdown_table(head, [[cell(row.get(name)) for name in head] for row in rows])


def cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def run_all(args: argparse.Namespace, directory: Path) -> list[str]:
    """Measure the parts, print their tables, and return the names of those that failed."""
    failed = []
    for name in args.parts or PARTS:
        result = run_apart(name, args, directory)
        print(report(name, result), flush=True)
        if "error" in result:
            failed.append(name)
    return failed


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.this_process:
        bench = Bench(torch.device(args.device), args.small, time.monotonic() + args.seconds, args.rows)
        run_part(args.parts[0], bench, args.json)
        return
    with tempfile.TemporaryDirectory() as temporary:
        failed = run_all(args, args.json or Path(temporary))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
