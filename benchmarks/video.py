"""Prompts with a video through log-probs, loss and backward: the shared row, dense rows, and the model's own forward.

    python -m benchmarks.video --image-tokens 4096 --shape narrow --repeats 1 --docs video-4096-08

A call measures one size. The prompt has a video of noise. The shared row and dense rows are this project's, which
encode the video once for all completions of a prompt. The plain side calls the model's own forward, which encodes it
for each completion. TRL 1.16 trains on rows with images alone.
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
from benchmarks.sides import plain_side

GRID_TOKENS = 256
"""Tokens of two frames of 448 x 448 pixels."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = comparison_parser(__doc__)
    parser.add_argument("--image-tokens", type=int, default=2048, help="tokens of all frames of the video")
    parser.add_argument("--num-frames", type=int, help="two frames become one grid; default: grids of 256 tokens")
    parser.add_argument("--completion-tokens", type=int, default=200)
    args = parser.parse_args(arguments)
    if args.num_frames is None:
        args.num_frames = 2 * max(1, args.image_tokens // GRID_TOKENS)
    return args


def workload(args: argparse.Namespace) -> Workload:
    return Workload(
        args.image_tokens, args.text_tokens, args.completion_tokens, args.num_generations, num_frames=args.num_frames
    )


ARGUMENTS = "num_generations image_tokens num_frames text_tokens completion_tokens shape".split()
COMPARED = Comparison("video.py", workload, ARGUMENTS, "plain", lambda setup, directory: plain_side(setup))


def main() -> None:
    run_benchmark(parse(), COMPARED.measure, COMPARED.measure_memory, COMPARED.table)


if __name__ == "__main__":
    main()
