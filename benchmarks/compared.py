"""Ways to compute one training pass, in comparison: CPU seconds, counted and computed FLOPs, memory, and gradients.

The sides run in one process on one thread and take turns. Times are CPU seconds, which other programs change less than
seconds of the clock. Ratios are medians over rounds. Memory is the growth of the resident size at its peak in a fresh
process per side.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

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
from benchmarks.report import result_arguments
from benchmarks.shapes import SHAPES, model_config
from benchmarks.sides import Setup, Side, differences, own_side

TRAINING = Training()


def comparison_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments that all comparisons have. Each has tokens of its own prompts besides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--text-tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    result_arguments(parser)
    return parser


@dataclass(frozen=True)
class Comparison:
    """The shared row, compared with dense rows and with a peer."""

    script: str
    workload: Callable[[argparse.Namespace], Workload]
    arguments: Sequence[str]
    """Arguments that the workload is made of, with `shape`."""
    peer: str
    """Name of the side that is not this project's: it encodes images for each completion, and bans no placeholders."""
    peer_side: Callable[[Setup, Path], Side]
    """Make that side. It may write to the directory."""

    @property
    def sides(self) -> dict[str, Callable[[Setup, Path], Side]]:
        """Return what makes each side: the shared row, this project's dense rows, and the peer."""
        return {
            "shared": lambda setup, directory: own_side(setup, shared=True),
            "dense": lambda setup, directory: own_side(setup, shared=False),
            self.peer: self.peer_side,
        }

    def flops(self, args: argparse.Namespace) -> dict[str, float]:
        """Compute the FLOPs of each side's pass."""
        config, work = model_config(SHAPES[args.shape]), self.workload(args)
        return {
            "shared": shared_flops(config, work, TRAINING).total,
            "dense": dense_flops(config, work, TRAINING, vision_once=True).total,
            self.peer: dense_flops(config, work, TRAINING).total,
        }

    def setup(self, args: argparse.Namespace, directory: Path) -> Setup:
        torch.set_num_threads(1)
        return Setup.build(SHAPES[args.shape], self.workload(args), TRAINING, directory / "model")

    def measure(self, args: argparse.Namespace) -> dict[str, Any]:
        """Measure everything that the table and the JSON contain."""
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            setup = self.setup(args, directory)
            sides = {name: make(setup, directory / name) for name, make in self.sides.items()}
            counted = {name: counted_flops(side.run) for name, side in sides.items()}  # warms up as well
            first, *others = sides
            like_peer = own_side(setup, shared=True, bans=False)
            agreement = {
                name: differences(like_peer if name == self.peer else sides[first], sides[name]) for name in others
            }
            seconds = alternate({name: side.run for name, side in sides.items()}, args.repeats, time.process_time)
        memory = {name: in_fresh_process(self.script, self.memory_arguments(args, name)) for name in sides}
        return self.result(args, seconds, memory, counted, agreement)

    def memory_arguments(self, args: argparse.Namespace, side: str) -> list[str]:
        return [*command_line(args, self.arguments), "--memory-of", side]

    def measure_memory(self, args: argparse.Namespace) -> int:
        """Measure the bytes of one side's first pass: activations, gradients, and memory of its kernels."""
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            return peak_growth(self.sides[args.memory_of](self.setup(args, directory), directory / "side").run)

    def result(
        self,
        args: argparse.Namespace,
        seconds: dict[str, list[float]],
        memory: dict[str, int],
        counted: dict[str, float],
        agreement: dict[str, dict[str, float]],
    ) -> dict[str, Any]:
        flops, (first, *others) = self.flops(args), self.sides
        speedups = {name: ratio(seconds, name, first) for name in others}
        ceilings = {name: flops[name] / flops[first] for name in others}
        return {
            "benchmark": Path(self.script).stem,
            "workload": {name: getattr(args, name) for name in self.arguments},
            "speedup_vs": speedups,
            "flop_ceiling": ceilings,
            "share_of_ceiling": {name: speedups[name] / ceilings[name] for name in others},
            "peak_memory_vs": {name: memory[first] / memory[name] for name in others},
            "token_ratio": self.workload(args).token_ratio,
            "seconds": seconds,
            "peak_memory_bytes": memory,
            "flops": flops,
            "counted_flops": counted,
            "differences": agreement,
            **environment(),
        }

    def table(self, result: dict[str, Any]) -> str:
        """Format one line per side, then one line per peer."""
        first, *others = self.sides
        rows = [
            [
                name,
                f"{median(result['seconds'][name]):.2f}",
                f"{result['flops'][name] / 1e12:.3g}",
                f"{result['counted_flops'][name] / 1e12:.3g}",
                f"{result['peak_memory_bytes'][name] / 2**20:.0f}",
            ]
            for name in self.sides
        ]
        lines = [
            f"{name} over {first}: time {result['speedup_vs'][name]:.2f}, FLOPs {result['flop_ceiling'][name]:.2f}, "
            f"share {result['share_of_ceiling'][name]:.2f}; memory, {first} over {name}: "
            f"{result['peak_memory_vs'][name]:.2f}; gradients differ by {result['differences'][name]['gradient']:.1e}"
            for name in others
        ]
        head = ["side", "CPU seconds", "TFLOP", "TFLOP counted", "peak MiB"]
        return "\n".join([markdown_table(head, rows), "", *lines])
