"""Time and memory of a trained vision tower on a group that is cut in four: apart from the micro-batches, or in each.

    python benchmarks/vision_apart.py           a model with the proportions of Qwen2.5-VL-3B
    python benchmarks/vision_apart.py --docs    put the table in docs/memory.md

Both sides have the same four sub-groups and run in one process, alternating. Memory is measured in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from torch import Tensor

from benchmarks.common import ROOT, alternate, environment, in_fresh_process, markdown_table, peak_growth, ratio
from benchmarks.flops import Workload
from benchmarks.report import fill, measured_on
from benchmarks.shapes import SHAPES, build_checkpoint, make_group, make_prompt
from benchmarks.training_phase import accumulate, make_trainer
from rl_vlm.trainer import Trainer
from rl_vlm.types import MicroBatch, ScoredGroup, SubGroup

PAGE = ROOT / "docs" / "memory.md"
WORK = Workload(image_tokens=300, text_tokens=40, completion_tokens=50, num_generations=8)
SIDES = {"apart": True, "in each": False}


@dataclass(frozen=True)
class Case:
    """A group that is cut in four, and a trainer of all weights."""

    trainer: Trainer
    group: ScoredGroup

    @staticmethod
    def build(shape: str, directory: Path, checkpointing: bool) -> Case:
        checkpoint = build_checkpoint(SHAPES[shape], directory)
        trainer = make_trainer(checkpoint, {}, {"gradient_checkpointing": checkpointing})
        return Case(trainer, make_group(make_prompt(checkpoint, WORK, SHAPES[shape]), WORK))

    def run(self, apart: bool) -> dict[str, Tensor]:
        """Return the gradients, of which the trainer keeps none."""
        pieces = [[first, first + 1] for first in range(0, WORK.num_generations, 2)]
        batches = [MicroBatch([SubGroup(self.group, piece, apart)], shared=True) for piece in pieces]
        accumulate(self.trainer, [self.group], batches)
        parameters = self.trainer.policy.named_parameters()
        gradients = {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
        self.trainer.policy.zero_grad()
        return gradients


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--docs", action="store_true", help="put the table in docs/memory.md")
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(shape: str, checkpointing: bool, repeats: int) -> list[str]:
    """Return a row of the table: ratios of time and memory, and the largest relative difference of a gradient."""
    with tempfile.TemporaryDirectory() as directory:
        case = Case.build(shape, Path(directory), checkpointing)
        apart, in_each = (case.run(side) for side in SIDES.values())
        floor = 1e-3 * max(float(gradient.norm()) for gradient in in_each.values())
        differences = [float((apart[n] - g).norm() / g.norm().clamp(min=floor)) for n, g in in_each.items()]
        seconds = alternate({name: lambda side=side: case.run(side) for name, side in SIDES.items()}, repeats)
    given = ["--shape", shape, *(["--checkpointing"] if checkpointing else []), "--memory-of"]
    memory = {name: in_fresh_process("vision_apart.py", [*given, name]) for name in SIDES}
    return [
        "yes" if checkpointing else "no",
        f"{ratio(seconds, 'apart', 'in each'):.2f}",
        f"{memory['apart'] / memory['in each']:.2f}",
        f"{max(differences):.0e}",
    ]


def measure_memory(shape: str, checkpointing: bool, side: str) -> int:
    """Return by how many bytes the resident memory grows at its peak, gradients included."""
    with tempfile.TemporaryDirectory() as directory:
        case = Case.build(shape, Path(directory), checkpointing)
        return peak_growth(lambda: case.run(SIDES[side]))


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.memory_of:
        print(json.dumps(measure_memory(args.shape, args.checkpointing, args.memory_of)))
        return
    head = ["gradient checkpointing", "time, apart / in each", "peak memory, apart / in each", "gradient Δ"]
    text = markdown_table(head, [measure(args.shape, checkpointing, args.repeats) for checkpointing in (False, True)])
    print(text)
    if args.docs:
        PAGE.write_text(fill(PAGE.read_text(), "vision_apart", f"{text}\n\n{measured_on([environment()])}"))


if __name__ == "__main__":
    main()
