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

from benchmarks.compared import TRAINING, Comparison
from benchmarks.flops import Workload, dense_flops, shared_flops
from benchmarks.report import result_arguments, run_benchmark
from benchmarks.shapes import SHAPES, model_config
from benchmarks.sides import own_side, trl_side


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
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    result_arguments(parser)
    return parser.parse_args(arguments)


def workload(args: argparse.Namespace) -> Workload:
    return Workload(
        args.image_tokens, args.text_tokens, args.completion_tokens, args.num_generations,
        args.observed_image_tokens, args.observed_text_tokens,
    )  # fmt: skip


def flops(args: argparse.Namespace) -> dict[str, float]:
    config, work = model_config(SHAPES[args.shape]), workload(args)
    return {
        "shared": shared_flops(config, work, TRAINING).total,
        "dense": dense_flops(config, work, TRAINING, vision_once=True).total,
        "trl": dense_flops(config, work, TRAINING).total,
    }


WORKLOAD = (
    "num_generations image_tokens text_tokens completion_tokens observed_image_tokens observed_text_tokens shape"
).split()


COMPARED = Comparison(
    "trajectories.py",
    workload,
    WORKLOAD,
    {
        "shared": lambda setup, directory: own_side(setup, shared=True),
        "dense": lambda setup, directory: own_side(setup, shared=False),
        "trl": trl_side,
    },
    flops,
    {"trl": lambda setup: own_side(setup, shared=True, bans=False)},
)


def main() -> None:
    run_benchmark(parse(), COMPARED.measure, COMPARED.measure_memory, COMPARED.table)


if __name__ == "__main__":
    main()
