"""One group through log-probs, loss and backward: this system against TRL, or against its own dense path.

    python benchmarks/train_step.py --peer trl --num-generations 8 --json result.json

Both sides and the floor run in one process, alternating; the reported ratios are medians over rounds. Memory is the
growth of the resident size at its peak in a fresh process per side. docs/benchmarks.md explains the numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

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
from benchmarks.flops import Training, Workload, dense_flops, floor_flops, shared_flops
from benchmarks.report import result_arguments, run_benchmark
from benchmarks.shapes import LORA_R, SHAPES, model_config
from benchmarks.sides import Setup, Side, differences, floor_side, own_side, trl_side


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["trl", "dense"], default="trl")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--image-tokens", type=int, default=1000)
    parser.add_argument("--text-tokens", type=int, default=40)
    parser.add_argument("--completion-tokens", type=int, default=200)
    parser.add_argument("--lora", action="store_true", help="adapters, frozen vision tower, gradient checkpointing")
    parser.add_argument("--beta", type=float, default=0.0, help="above 0 with a reference pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--memory-of", choices=["ours", "trl", "dense"], help=argparse.SUPPRESS)
    result_arguments(parser)
    return parser.parse_args(arguments)


def workload(args: argparse.Namespace) -> Workload:
    return Workload(args.image_tokens, args.text_tokens, args.completion_tokens, args.num_generations)


def training(args: argparse.Namespace) -> Training:
    return Training(LORA_R if args.lora else 0, gradient_checkpointing=args.lora, beta=args.beta)


def make_side(name: str, setup: Setup, directory: Path) -> Side:
    if name == "trl":
        return trl_side(setup, directory / "trl")
    return floor_side(setup) if name == "floor" else own_side(setup, shared=name == "ours")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the table and the JSON contain."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        setup = Setup.build(SHAPES[args.shape], workload(args), training(args), directory / "model")
        sides = {name: make_side(name, setup, directory) for name in ("ours", args.peer, "floor")}
        counted = {name: counted_flops(side.run) for name, side in sides.items()}  # warms up as well
        agreement = differences(own_side(setup, shared=True, bans=args.peer == "dense"), sides[args.peer])
        seconds = alternate({name: side.run for name, side in sides.items()}, args.repeats)
    memory = {name: in_fresh_process("train_step.py", memory_arguments(args, name)) for name in ("ours", args.peer)}
    return result(args, seconds, memory, counted, agreement)


def memory_arguments(args: argparse.Namespace, side: str) -> list[str]:
    return [*command_line(args, WORKLOAD), "--memory-of", side]


def measure_memory(args: argparse.Namespace) -> int:
    """Measure the bytes of one side's first pass: activations, gradients, and memory of its kernels."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        setup = Setup.build(SHAPES[args.shape], workload(args), training(args), directory / "model")
        return peak_growth(make_side(args.memory_of, setup, directory).run)


def result(
    args: argparse.Namespace,
    seconds: dict[str, list[float]],
    memory: dict[str, int],
    counted: dict[str, float],
    agreement: dict[str, float],
) -> dict[str, Any]:
    peer, config, work = args.peer, model_config(SHAPES[args.shape]), workload(args)
    flops = {
        "ours": shared_flops(config, work, training(args)).total,
        peer: dense_flops(config, work, training(args), vision_once=peer == "dense").total,
        "floor": floor_flops(config, work, training(args)).total,
    }
    ceiling, speedup = flops[peer] / flops["ours"], ratio(seconds, peer, "ours")
    return {
        "benchmark": "train_step",
        "peer": peer,
        "workload": {name: getattr(args, name) for name in WORKLOAD},
        "speedup_vs_peer": speedup,
        "flop_ceiling": ceiling,
        "share_of_ceiling": speedup / ceiling,
        "peak_memory_vs_peer": memory["ours"] / memory[peer],
        "time_vs_floor": ratio(seconds, "ours", "floor"),
        "token_ratio": work.token_ratio,
        "seconds": seconds,
        "peak_memory_bytes": memory,
        "flops": flops,
        "counted_flops": counted,
        "differences": agreement,
        **environment(),
    }


WORKLOAD = "num_generations image_tokens text_tokens completion_tokens lora beta shape".split()


def table(result: dict[str, Any]) -> str:
    """Format one line per side, then one line per conclusion."""
    peer = result["peer"]
    rows = [
        [
            name,
            f"{median(result['seconds'][name]):.2f}",
            f"{result['flops'][name] / 1e12:.3g}",
            f"{result['counted_flops'][name] / 1e12:.3g}",
            f"{result['peak_memory_bytes'][name] / 2**20:.0f}" if name != "floor" else "",
        ]
        for name in ("ours", peer, "floor")
    ]
    found = result["differences"]
    conclusions = [
        ("speedup_vs_peer", f"median of {peer}'s time over ours, round by round"),
        ("flop_ceiling", f"FLOPs of {peer}'s pass over those of the shared pass: the speed-up at equal FLOP/s"),
        ("share_of_ceiling", "the first over the second"),
        ("peak_memory_vs_peer", "growth of the resident size at its peak, ours over the peer's"),
        ("time_vs_floor", "our time over that of stock calls on the same unique tokens, without sharing machinery"),
        ("token_ratio", "rho = k (P + R) / (P + k R): language tokens alone"),
    ]
    lines = [f"{name:20} {result[name]:6.3f}   {meaning}" for name, meaning in conclusions]
    return "\n".join(
        [
            markdown_table(["side", "seconds", "TFLOP", "TFLOP counted", "peak MiB"], rows),
            "",
            *lines,
            f"agreement            loss {found['loss']:.1e}, gradients {found['gradient']:.1e} (largest relative)",
        ]
    )


def main() -> None:
    run_benchmark(parse(), measure, measure_memory, table)


if __name__ == "__main__":
    main()
