"""Kill a digits run at random moments, resume it each time, and compare it with the run that was not killed.

    python -m tests.manual.kill_digits [--max-steps 20] [--kills 10] [--seed 0] [KEY=VALUE ...]

Every run is a process of its own and is killed with SIGKILL, at a moment drawn from the whole run: while it loads,
generates, trains, evaluates or saves. Prints a row per kill, and ends with status 1 if one run differs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from rl_vlm.checkpoint import store
from tests.helpers.tiny_run import completions, metric_lines, weights

CONFIG = "configs/digits.yaml"


def start(output_dir: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launch.train", CONFIG, f"output_dir={output_dir}", *overrides]
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=open(f"{output_dir}.log", "ab"))


def finish(process: subprocess.Popen[bytes], output_dir: Path) -> None:
    if process.wait() != 0:
        raise SystemExit(f"the run ended with status {process.returncode}; see {output_dir}.log")


def differences(found: Path, expected: Path) -> list[str]:
    """What differs between two runs; every step once is part of equal metrics and equal parquet files."""
    last = store.complete(expected)[-1].name
    ours, theirs = weights(found / last), weights(expected / last)
    equal = {
        "metrics": metric_lines(found) == metric_lines(expected),
        "completions": completions(found) == completions(expected),
        "weights": ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours),
    }
    return [name for name, is_equal in equal.items() if not is_equal]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--directory", type=Path, default=Path("runs/kill_digits"))
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the run")
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    overrides = [f"max_steps={options.max_steps}", "save_steps=2", "disable_tqdm=true", *options.overrides]

    straight = options.directory / "straight"
    begin = time.perf_counter()
    finish(start(straight, overrides), straight)
    duration = time.perf_counter() - begin
    print(f"a run of {options.max_steps} steps takes {duration:.0f} s\n")

    moments = random.Random(options.seed)
    resume = [*overrides, "resume_from_checkpoint=auto"]
    failed = 0
    print(f"{'kill':>4}  {'after s':>7}  {'resumed from':14}  differs in")
    for kill in range(options.kills):
        output_dir, seconds = options.directory / f"killed-{kill}", moments.uniform(0, duration)
        process = start(output_dir, overrides)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        found = store.find("auto", output_dir)
        origin = found.name if found else "the start"
        finish(start(output_dir, resume), output_dir)
        differing = differences(output_dir, straight)
        failed += bool(differing)
        print(f"{kill:4}  {seconds:7.1f}  {origin:14}  {', '.join(differing) or 'nothing'}", flush=True)
    print(f"\n{options.kills - failed} of {options.kills} killed runs equal the run that was not killed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
