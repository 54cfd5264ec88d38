"""What a GPU proves and measures, in parts that each end within 8 minutes.

    python benchmarks/gpu.py                          every part, one after the other
    python benchmarks/gpu.py training_pass memory     some of them
    python benchmarks/gpu.py --device cpu --small     every part in its small form, on any machine
    python benchmarks/gpu.py --json DIRECTORY         write DIRECTORY/PART.json as soon as a part has measured something

It needs torch, transformers, accelerate and peft beside this project. What compares with TRL is left out without it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch

from benchmarks.common import environment, markdown_table
from benchmarks.gpu_parts.bench import Bench

PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "correctness": ("correctness", {}),
    "training_3b": ("training_pass", {"model": "3b"}),
    "training_7b": ("training_pass", {"model": "7b"}),
    "attention": ("attention", {}),
    "rollouts": ("rollouts", {}),
    "digits": ("digits", {}),
    "whole_run": ("whole_run", {}),
    "memory": ("memory", {"expandable": False}),
    "memory_expandable": ("memory", {"expandable": True}),
}
"""A module of `benchmarks/gpu_parts` for each part, and its options. The module has a HEAD, the columns of its table,
and `measure`, which yields the rows."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; all if none is given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small models and few repeats")
    parser.add_argument("--json", type=Path, metavar="DIRECTORY")
    args = parser.parse_args(arguments)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return args


def run_part(name: str, bench: Bench, directory: Path | None) -> dict[str, Any]:
    """Measure one part, print its table, and write its result after every row."""
    module, options = PARTS[name]
    part = importlib.import_module(f"benchmarks.gpu_parts.{module}")
    result: dict[str, Any] = {
        "benchmark": f"gpu_{name}",
        **environment(bench.device.type, bench.dtype),
        "small": bench.small,
        "rows": [],
    }
    rows: Iterator[dict[str, Any]] = part.measure(bench, **options)
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)
        result["rows"].append(row)
        if directory:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n## {name}\n\n{table(part.HEAD, result['rows'])}", flush=True)
    return result


def table(head: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Format the columns `head` of the rows. A value that a row does not have is left empty."""
    return markdown_table(head, [[cell(row.get(name)) for name in head] for row in rows])


def cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    args = parse()
    bench = Bench(torch.device(args.device), args.small)
    for name in args.parts or PARTS:
        run_part(name, bench, args.json)


if __name__ == "__main__":
    main()
