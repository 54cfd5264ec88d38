"""Cost of a training pass against group size, image size and completion length: shared, dense, and the floor.

    python benchmarks/scaling.py --json result.json

Each point is one group; one quantity varies and the others stay at 8 completions of 200 tokens behind 1,000 tokens of
image and 40 of text. The last row has little to share, rho < 1.15: there a shared row must not cost more than it saves.
The vision tower runs once per group, and on the dense path once per micro-batch of 16 rows. The measured ratio is
reported beside those of FLOPs and of language tokens (rho).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import alternate, environment, ratio
from benchmarks.flops import SWEEPS, Training, Workload, flop_ceiling
from benchmarks.report import finish, result_arguments, scaling_table
from benchmarks.shapes import SHAPES, model_config
from benchmarks.sides import Setup, floor_side, own_side

LITTLE_TO_SHARE = Workload(image_tokens=64, text_tokens=40, completion_tokens=600, num_generations=4)
"""rho = 1.12"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*SWEEPS, "little_to_share"], help="one of the sweeps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    result_arguments(parser)
    return parser.parse_args(arguments)


def points(only: str | None) -> list[tuple[str, Workload]]:
    """Return each point with the name of its sweep; only those of the sweep `only` if it is given."""
    found = [(name, dataclasses.replace(Workload(), **{name: value})) for name, row in SWEEPS.items() for value in row]
    found.append(("little_to_share", LITTLE_TO_SHARE))
    return [(name, work) for name, work in found if only in (None, name)]


def measure_point(sweep: str, work: Workload, shape: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        setup = Setup.build(SHAPES[shape], work, Training(), Path(directory))
        sides = {"shared": own_side(setup, True), "dense": own_side(setup, False), "floor": floor_side(setup)}
        for side in sides.values():
            side.run()
        seconds = alternate({name: side.run for name, side in sides.items()}, repeats)
    return {
        "sweep": sweep,
        **dataclasses.asdict(work),
        "token_ratio": work.token_ratio,
        "flop_ratio": flop_ceiling(model_config(SHAPES[shape]), work, Training(), vision_once=True),
        "measured_ratio": ratio(seconds, "dense", "shared"),
        "time_vs_floor": ratio(seconds, "shared", "floor"),
        "seconds": seconds,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = [measure_point(sweep, work, args.shape, args.repeats) for sweep, work in points(args.only)]
    return {"benchmark": "scaling", "shape": args.shape, "points": found, **environment()}


def main() -> None:
    args = parse()
    measured = measure(args)
    finish(measured, scaling_table([measured]), args)


if __name__ == "__main__":
    main()
