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
from benchmarks.flops import Training, Workload
from benchmarks.shapes import SHAPES
from benchmarks.sides import Setup, Side, differences

TRAINING = Training()


@dataclass(frozen=True)
class Comparison:
    """Sides of a benchmark, of which the first is compared with the others."""

    script: str
    workload: Callable[[argparse.Namespace], Workload]
    arguments: Sequence[str]
    """Arguments that the workload is made of, with `shape`."""
    sides: dict[str, Callable[[Setup, Path], Side]]
    """Make a side. Each may write to the directory."""
    flops: Callable[[argparse.Namespace], dict[str, float]]
    """Compute the FLOPs of each side's pass."""
    peers: dict[str, Callable[[Setup], Side]]
    """Make the first side in the form whose gradients equal those of another side, if it is another form."""

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
            agreement = {
                name: differences(self.peers[name](setup) if name in self.peers else sides[first], sides[name])
                for name in others
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
