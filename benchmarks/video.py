"""Prompts with a video through log-probs, loss and backward: the shared row, dense rows, and the model's own forward.

    python -m benchmarks.video --image-tokens 4096 --json result.json

The prompt has a video of noise. The shared row and dense rows are this project's, which encode the video once for all
completions of a prompt. The plain side calls the model's own forward, which encodes it for each completion. TRL 1.16
trains on rows with images alone.
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
from benchmarks.sides import own_side, plain_side


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--image-tokens", type=int, default=2048, help="tokens of all frames of the video")
    parser.add_argument("--num-frames", type=int, default=16, help="two frames become one grid of tokens")
    parser.add_argument("--text-tokens", type=int, default=40)
    parser.add_argument("--completion-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    result_arguments(parser)
    return parser.parse_args(arguments)


ARGUMENTS = "num_generations image_tokens num_frames text_tokens completion_tokens shape".split()


def workload(args: argparse.Namespace) -> Workload:
    return Workload(
        args.image_tokens, args.text_tokens, args.completion_tokens, args.num_generations, num_frames=args.num_frames
    )


def flops(args: argparse.Namespace) -> dict[str, float]:
    config, work = model_config(SHAPES[args.shape]), workload(args)
    return {
        "shared": shared_flops(config, work, TRAINING).total,
        "dense": dense_flops(config, work, TRAINING, vision_once=True).total,
        "plain": dense_flops(config, work, TRAINING).total,
    }


COMPARED = Comparison(
    "video.py",
    workload,
    ARGUMENTS,
    {
        "shared": lambda setup, directory: own_side(setup, shared=True),
        "dense": lambda setup, directory: own_side(setup, shared=False),
        "plain": lambda setup, directory: plain_side(setup),
    },
    flops,
    {"plain": lambda setup: own_side(setup, shared=True, bans=False)},
)


def main() -> None:
    run_benchmark(parse(), COMPARED.measure, COMPARED.measure_memory, COMPARED.table)


if __name__ == "__main__":
    main()
