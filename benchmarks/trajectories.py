"""Trajectories of two turns through log-probs, loss and backward: the shared row, dense rows, and TRL.

    python -m benchmarks.trajectories --json result.json

The shape is that of a tool that crops the image: a prompt of an image and text, a turn, an observation of a text and
an image of its own for each completion, and a second turn. The sides run in one process on one thread and take turns.
Times are CPU seconds, which other programs change less than seconds of the clock. Ratios are medians over rounds.
Memory is the growth of the resident size at its peak in a fresh process per side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch

from benchmarks.common import (
    alternate,
    command_line,
    environment,
    in_fresh_process,
    markdown_table,
    peak_growth,
    ratio,
)
from benchmarks.counting import counted_flops
from benchmarks.flops import Training, Workload, dense_flops, shared_flops
from benchmarks.report import result_arguments, run_benchmark
from benchmarks.shapes import SHAPES, model_config
from benchmarks.sides import Setup, Side, differences, own_side, trl_side

NAMES = ("shared", "dense", "trl")
TRAINING = Training()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--image-tokens", type=int, default=1000)
    parser.add_argument("--text-tokens", type=int, default=40)
    parser.add_argument("--completion-tokens", type=int, default=160, help="sampled tokens of both turns")
    parser.add_argument("--observed-image-tokens", type=int, default=160)
    parser.add_argument("--observed-text-tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--memory-of", choices=NAMES, help=argparse.SUPPRESS)
    result_arguments(parser)
    return parser.parse_args(arguments)


def workload(args: argparse.Namespace) -> Workload:
    return Workload(
        args.image_tokens, args.text_tokens, args.completion_tokens, args.num_generations,
        args.observed_image_tokens, args.observed_text_tokens,
    )  # fmt: skip


def make_setup(args: argparse.Namespace, directory: Path) -> Setup:
    torch.set_num_threads(1)
    return Setup.build(SHAPES[args.shape], workload(args), TRAINING, directory / "model")


def make_side(name: str, setup: Setup, directory: Path) -> Side:
    return trl_side(setup, directory / "trl") if name == "trl" else own_side(setup, shared=name == "shared")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the table and the JSON contain."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        setup = make_setup(args, directory)
        sides = {name: make_side(name, setup, directory) for name in NAMES}
        counted = {name: counted_flops(side.run) for name, side in sides.items()}  # warms up as well
        agreement = {
            "dense": differences(sides["shared"], sides["dense"]),
            "trl": differences(own_side(setup, shared=True, bans=False), sides["trl"]),
        }
        seconds = alternate({name: side.run for name, side in sides.items()}, args.repeats, time.process_time)
    memory = {name: in_fresh_process("trajectories.py", memory_arguments(args, name)) for name in NAMES}
    return result(args, seconds, memory, counted, agreement)


def memory_arguments(args: argparse.Namespace, side: str) -> list[str]:
    return [*command_line(args, WORKLOAD), "--memory-of", side]


def measure_memory(args: argparse.Namespace) -> int:
    """Measure the bytes of one side's first pass: activations, gradients, and memory of its kernels."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        return peak_growth(make_side(args.memory_of, make_setup(args, directory), directory).run)


def result(
    args: argparse.Namespace,
    seconds: dict[str, list[float]],
    memory: dict[str, int],
    counted: dict[str, float],
    agreement: dict[str, dict[str, float]],
) -> dict[str, Any]:
    config, work = model_config(SHAPES[args.shape]), workload(args)
    flops = {
        "shared": shared_flops(config, work, TRAINING).total,
        "dense": dense_flops(config, work, TRAINING, vision_once=True).total,
        "trl": dense_flops(config, work, TRAINING).total,
    }
    peers = NAMES[1:]
    speedups = {name: ratio(seconds, name, "shared") for name in peers}
    ceilings = {name: flops[name] / flops["shared"] for name in peers}
    return {
        "benchmark": "trajectories",
        "workload": {name: getattr(args, name) for name in WORKLOAD},
        "speedup_vs": speedups,
        "flop_ceiling": ceilings,
        "share_of_ceiling": {name: speedups[name] / ceilings[name] for name in peers},
        "peak_memory_vs": {name: memory["shared"] / memory[name] for name in peers},
        "token_ratio": work.token_ratio,
        "seconds": seconds,
        "peak_memory_bytes": memory,
        "flops": flops,
        "counted_flops": counted,
        "differences": agreement,
        **environment(),
    }


WORKLOAD = (
    "num_generations image_tokens text_tokens completion_tokens observed_image_tokens observed_text_tokens shape"
).split()


def table(result: dict[str, Any]) -> str:
    """Format one line per side, then one line per peer."""
    rows = [
        [
            name,
            f"{median(result['seconds'][name]):.2f}",
            f"{result['flops'][name] / 1e12:.3g}",
            f"{result['counted_flops'][name] / 1e12:.3g}",
            f"{result['peak_memory_bytes'][name] / 2**20:.0f}",
        ]
        for name in NAMES
    ]
    lines = [
        f"{name} over shared: time {result['speedup_vs'][name]:.2f}, FLOPs {result['flop_ceiling'][name]:.2f}, "
        f"share {result['share_of_ceiling'][name]:.2f}; memory, shared over {name}: "
        f"{result['peak_memory_vs'][name]:.2f}; gradients differ by {result['differences'][name]['gradient']:.1e}"
        for name in NAMES[1:]
    ]
    head = ["side", "CPU seconds", "TFLOP", "TFLOP counted", "peak MiB"]
    return "\n".join([markdown_table(head, rows), "", *lines])


def main() -> None:
    run_benchmark(parse(), measure, measure_memory, table)


if __name__ == "__main__":
    main()
