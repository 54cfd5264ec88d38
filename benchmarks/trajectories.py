"""Trajectories of two turns through log-probs, loss and backward: the shared row, dense rows, and TRL.

    python -m benchmarks.trajectories --json result.json

The shape is that of a tool that crops the image: a prompt of an image and text, a turn, an observation of a text and
an image of its own for each completion, and a second turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.compared import Comparison, comparison_parser
from benchmarks.flops import Workload
from benchmarks.report import run_benchmark
from benchmarks.sides import trl_side


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = comparison_parser(__doc__)
    parser.add_argument("--image-tokens", type=int, default=1000)
    parser.add_argument("--completion-tokens", type=int, default=160, help="sampled tokens of both turns")
    parser.add_argument("--observed-image-tokens", type=int, default=160)
    parser.add_argument("--observed-text-tokens", type=int, default=40)
    return parser.parse_args(arguments)


def workload(args: argparse.Namespace) -> Workload:
    return Workload(
        args.image_tokens, args.text_tokens, args.completion_tokens, args.num_generations,
        args.observed_image_tokens, args.observed_text_tokens,
    )  # fmt: skip


ARGUMENTS = (
    "num_generations image_tokens text_tokens completion_tokens observed_image_tokens observed_text_tokens shape"
).split()
COMPARED = Comparison("trajectories.py", workload, ARGUMENTS, "trl", trl_side)


def main() -> None:
    run_benchmark(parse(), COMPARED.measure, COMPARED.measure_memory, COMPARED.table)


if __name__ == "__main__":
    main()
