"""Kill a rank of a sharded run within its saves, resume each time, and compare with the run that was not killed.

    python -m tests.manual.kill_sharded_saves [--sharding zero3] [--kills 20]

Each launch resumes from the newest checkpoint, saves one more, and is killed in the save after that. Prints a row per
kill, and ends with status 1 if the runs differ in metrics, completions, weights or optimizer state.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from rl_vlm.checkpoint import store
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RunConfig
from tests.helpers import mixed_run, tiny_run
from tests.helpers.two_processes import launch
from tests.manual.killed_save import ON_ALL_RANKS, POINTS

KILLS = [(0, point) for point in POINTS] + [(1, point) for point in ON_ALL_RANKS]


def start(config: RunConfig, sharding: str, module: str, *arguments: str) -> int:
    path = Path(config.train.output_dir).with_suffix(".yaml")
    path.write_text(to_yaml(config))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerate = ("--config_file", f"launch/accelerate/{sharding}.yaml", "--num_processes", "2")
    result = launch(*accelerate, "-m", module, str(path), *arguments)
    path.with_suffix(".log").write_text(result.stderr)
    return result.returncode


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files of a checkpoint."""
    return {name: value for path in directory.rglob("*.safetensors") for name, value in load_file(path).items()}


def differences(found: Path, expected: Path, last: int) -> list[str]:
    ours, theirs = (tensors(store.checkpoint_path(run, last)) for run in (found, expected))
    equal = {
        "metrics": tiny_run.metric_lines(found) == tiny_run.metric_lines(expected),
        "completions": tiny_run.completions(found) == tiny_run.completions(expected),
        "tensors": ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours),
    }
    return [name for name, is_equal in equal.items() if not is_equal]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharding", default="zero3", choices=["ddp", "zero2", "zero3", "fsdp2"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--directory", type=Path, default=Path("runs/kill_sharded_saves"))
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    options.directory.mkdir(parents=True)
    model = tiny_run.build_checkpoint(options.directory / "model")
    steps = options.kills + options.kills // len(KILLS) + 3  # a kill after the commit leaves one checkpoint more
    settings = {
        "dataset_name": mixed_run.ROWS, "reward_funcs": [mixed_run.REWARD, tiny_run.COIN], "prompts_per_step": 4,
        "max_steps": steps, "save_steps": 1, "save_total_limit": 2, "learning_rate": 1e-3, "num_iterations": 2,
        "resume_from_checkpoint": "auto",
    }  # fmt: skip
    straight, killed = (
        tiny_run.make_config(model, options.directory / name, **settings) for name in ("straight", "killed")
    )
    assert start(straight, options.sharding, "launch.train") == 0

    output_dir = Path(killed.train.output_dir)
    for kill, (rank, point) in zip(range(options.kills), itertools.cycle(KILLS), strict=False):
        newest = store.find("auto", output_dir)
        status = start(killed, options.sharding, "tests.manual.killed_save", str(rank), point, "1")
        saved = [path.name for path in store.complete(output_dir)]
        left = [path.name for path in output_dir.glob("unfinished-*")]
        print(
            f"{kill:3} rank {rank} {point:10} from {newest and newest.name}: status {status}, {saved} {left}",
            flush=True,
        )
        assert status != 0
    assert start(killed, options.sharding, "launch.train") == 0
    found = differences(output_dir, Path(straight.train.output_dir), steps)
    print(f"differs in: {', '.join(found) or 'nothing'}")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
