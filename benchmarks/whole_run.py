"""Whole generation windows of a run: this project against TRL's `GRPOTrainer`, from drawing rows to the update.

    python benchmarks/whole_run.py --peer trl --json result.json
    python benchmarks/whole_run.py --shape digits --windows 24    # a model that learns to read digits

Both sides train the same weights on the same rows with the same reward function and settings. They take turns in one
process, a window each, and sample with the model itself. TRL's own `train()` runs in a thread that waits for its turn.
The first window of each warms up and is left out of times. docs/benchmarks.md explains the numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch
from transformers import AutoConfig

from benchmarks.common import command_line, environment, in_fresh_process, peak_bytes, product_rate
from benchmarks.flops import Training, Workload, dense_flops, rollout_flops, shared_flops
from benchmarks.report import result_arguments, run_benchmark
from benchmarks.shapes import SHAPES
from benchmarks.whole_run_sides import Case, Ours, Trl
from benchmarks.whole_run_tables import SIDES, STAGES, whole_run_table

SMALL = {"shape": "toy", "windows": 3, "image_tokens": 16, "completion_tokens": 8, "num_generations": 4}
DIGITS = {"image_tokens": 4, "completion_tokens": 12, "prompts_per_step": 32, "num_generations": 16,
          "num_iterations": 4, "learning_rate": 1e-3, "micro_batch_tokens": 16384}  # fmt: skip
"""Settings near those of configs/digits.yaml."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["trl"], default="trl")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of forwards; default: bfloat16 on a GPU")
    parser.add_argument("--small", action="store_true", help="a toy, for about a minute")
    parser.add_argument("--shape", choices=["digits", *SHAPES], default="small", help="digits: that of examples/digits")
    parser.add_argument("--windows", type=int, default=4, help="of each side, the first of which warms up")
    parser.add_argument("--image-tokens", type=int, default=100, help="at least, per image; a square number")
    parser.add_argument("--completion-tokens", type=int, default=24)
    parser.add_argument("--prompts-per-step", type=int, default=2)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--num-iterations", type=int, default=1, help="updates per window")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--beta", type=float, default=0.0, help="above 0 with a reference model")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    result_arguments(parser)
    first = parser.parse_args(arguments)
    parser.set_defaults(**(SMALL if first.small else DIGITS if first.shape == "digits" else {}))
    args = parser.parse_args(arguments)
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def make_side(name: str, case: Case) -> Ours | Trl:
    return Ours(case) if name == "ours" else Trl(case)


def timed_window(side: Ours | Trl) -> tuple[dict[str, float], dict[str, float]]:
    """Run a window; return its seconds by stage and its metrics."""
    side.clock.seconds.clear()
    with side.clock.stage("other"):
        metrics = side.window()
    return {stage: side.clock.seconds[stage] for stage in STAGES}, metrics


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the windows of both sides in turn, and measure everything that the table and the JSON contain."""
    with tempfile.TemporaryDirectory() as temporary:
        case = Case.build(args, Path(temporary))
        sides = {name: make_side(name, case) for name in SIDES}
        windows = []
        for _ in range(args.windows):
            windows.append({name: timed_window(side) for name, side in sides.items()})
            print(progress(windows), file=sys.stderr, flush=True)
        for side in sides.values():
            side.close()
        config = AutoConfig.from_pretrained(case.config.model.model_name_or_path)
    memory = {name: in_fresh_process("whole_run.py", memory_arguments(args, name)) for name in SIDES}
    rate = product_rate(args.device, getattr(torch, args.dtype))
    flops = [window_flops(args, config, window) for window in windows]
    return result(args, windows, memory) | {"flops": flops, "flops_per_second": rate}


def window_flops(args: argparse.Namespace, config: Any, window: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Compute the FLOPs of a window by side and stage, from the mean length of its completions.

    TRL computes a prompt and its image once per completion, in rollouts and in training.
    """
    found = {}
    for name, (_, metrics) in window.items():
        length = max(1, round(metrics["completions/mean_length"]))
        prompts, count = args.prompts_per_step, args.num_generations
        tokens = window["ours"][1]["step_tokens"] - prompts * count * window["ours"][1]["completions/mean_length"]
        text = max(0, round(tokens / prompts) - args.image_tokens)
        work = Workload(args.image_tokens, text, length, count)
        training = Training(gradient_checkpointing=args.gradient_checkpointing, beta=args.beta)
        layout, prefills = (shared_flops, 1) if name == "ours" else (dense_flops, count)
        found[name] = {
            "rollout": prompts * rollout_flops(config, work, prefills),
            "training": prompts * args.num_iterations * layout(config, work, training).total,
        }
    return found


def progress(windows: list[dict[str, Any]]) -> str:
    """Describe the last window in a line."""
    parts = [f"{n} {sum(s.values()):.1f} s, reward {m['reward']:.2f}" for n, (s, m) in windows[-1].items()]
    return f"window {len(windows)}: {'; '.join(parts)}"


def memory_arguments(args: argparse.Namespace, side: str) -> list[str]:
    return [*command_line(args, WORKLOAD), "--memory-of", side]


def measure_memory(args: argparse.Namespace) -> int:
    """Measure the bytes of one side's first two windows: on a CPU by how much they grow beyond the loaded model."""
    with tempfile.TemporaryDirectory() as temporary:
        side = make_side(args.memory_of, Case.build(args, Path(temporary)))

        def run() -> None:
            for _ in range(2):
                side.window()

        peak = peak_bytes(run, torch.device(args.device))
        side.close()
        return peak


def result(args: argparse.Namespace, windows: list[dict[str, Any]], memory: dict[str, int]) -> dict[str, Any]:
    totals = {name: [sum(window[name][0].values()) for window in windows] for name in SIDES}
    timed = list(zip(totals["trl"], totals["ours"], strict=True))[1:]
    return {
        "benchmark": "whole_run",
        "peer": args.peer,
        "workload": {name: getattr(args, name) for name in WORKLOAD},
        "speedup_vs_peer": median(trl / ours for trl, ours in timed),
        "peak_memory_vs_peer": memory["ours"] / memory["trl"],
        "seconds": {name: [window[name][0] for window in windows] for name in SIDES},
        "reward": {name: [window[name][1]["reward"] for window in windows] for name in SIDES},
        "equal_rewards": {name: [window[name][1]["frac_reward_zero_std"] for window in windows] for name in SIDES},
        "peak_memory_bytes": memory,
        **environment(args.device, args.dtype),
    }


WORKLOAD = (
    "device dtype shape windows image_tokens completion_tokens prompts_per_step num_generations num_iterations "
    "learning_rate beta gradient_checkpointing micro_batch_tokens"
).split()


def table(result: dict[str, Any]) -> str:
    """Format the seconds of a window by stage on each side, then one line per conclusion."""
    conclusions = [
        ("speedup_vs_peer", "median of TRL's time over ours, window by window, without the first"),
        ("peak_memory_vs_peer", "peak memory of two windows in a fresh process, ours over TRL's"),
    ]
    lines = [f"{name:20} {result[name]:6.3f}   {meaning}" for name, meaning in conclusions]
    shares = [ceiling_line(result, name) for name in SIDES]
    curves = [f"reward, {name:12} {' '.join(f'{r:.2f}' for r in result['reward'][name])}" for name in SIDES]
    return "\n".join([whole_run_table([result]), "", *lines, *shares, *curves])


def ceiling_line(result: dict[str, Any], side: str) -> str:
    """Say which share of a window's time, without the first, its FLOPs would take at the rate of matrix products."""
    stages = ("rollout", "training")
    pairs = list(zip(result["flops"], result["seconds"][side], strict=True))[1:]
    ideal = {stage: sum(flops[side][stage] for flops, _ in pairs) / result["flops_per_second"] for stage in stages}
    spent = {stage: sum(seconds[stage] for _, seconds in pairs) for stage in stages}
    whole = sum(sum(seconds.values()) for _, seconds in pairs)
    parts = [f"{stage} {sum(f[side][stage] for f, _ in pairs) / len(pairs) / 1e12:.3g} TFLOP a window, "
             f"{ideal[stage] / spent[stage]:.0%} of the ceiling" for stage in stages]  # fmt: skip
    return f"{side:20} {'; '.join(parts)}; whole window {sum(ideal.values()) / whole:.0%}"


def main() -> None:
    args = parse()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both sides use a GPU if they see one
    run_benchmark(args, measure, measure_memory, table)


if __name__ == "__main__":
    main()
