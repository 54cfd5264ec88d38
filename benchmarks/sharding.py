"""Memory, traffic and time of each way to shard a model over processes, beside theory.

    python benchmarks/sharding.py                          every sharding on a model of 416 million parameters
    python benchmarks/sharding.py --small                  a tiny model on two processes, to check the benchmark itself
    python benchmarks/sharding.py --shardings fsdp2 --processes 2 4

Each case is a run of benchmarks/sharded_rank.py under `accelerate launch`, on CPUs over gloo, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import RETURN_FREED_MEMORY, ROOT, environment
from benchmarks.report import finish, result_arguments
from benchmarks.shapes import SHAPES, build_checkpoint
from benchmarks.sharding_tables import SHARDINGS, sharding_tables
from rl_vlm.distributed.zero_config import AUTO_SIZES

LAUNCH_FILES = {"ddp": "cpu", "zero2": "zero2", "zero3": "zero3", "zero3_freed": "zero3", "fsdp2": "fsdp2"}
"""The launcher's file of each sharding. `zero3_freed` is ZeRO-3 as it runs on a model of billions of parameters."""
FREED = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
"""DeepSpeed frees layers within a step if more weights than this are gathered: by default a billion."""
LARGEST_DDP = 2
TOO_LARGE = {("zero2", 2), ("zero2", 4), ("zero3_freed", 4)}
"""Cases that run a model with 6 of 24 layers, because the machine has 24 GiB. DDP on four is left out."""


@dataclass(frozen=True)
class Case:
    """One launch."""

    sharding: str
    num_processes: int
    shape: str
    beta: float = 0.0
    num_timed: int = 0
    """Steps that are timed; if there are any, traffic is counted as well."""

    @property
    def name(self) -> str:
        notes = [*(["reference"] if self.beta else []), *(["6 layers"] if self.shape == "quarter" else [])]
        return ", ".join([f"{SHARDINGS[self.sharding]} × {self.num_processes}", *notes])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shardings", nargs="+", choices=SHARDINGS, default=list(SHARDINGS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--shape", choices=SHAPES, default="medium", help="of most models whose memory is measured")
    parser.add_argument("--step-shape", choices=SHAPES, default="small", help="of the model whose steps are")
    parser.add_argument("--num-timed", type=int, default=5, help="timed steps on two processes")
    parser.add_argument("--small", action="store_true", help="a tiny model on two processes, without memory")
    result_arguments(parser)
    args = parser.parse_args(arguments)
    if args.small:
        args.processes, args.step_shape, args.num_timed = [], "toy", 1
    return args


def memory_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases whose memory is measured: with a reference on two processes, of shardings of it."""
    for num_processes in args.processes:
        for sharding in args.shardings:
            if (sharding == "ddp" and num_processes > LARGEST_DDP) or sharding == "zero3":
                continue
            yield Case(sharding, num_processes, "quarter" if (sharding, num_processes) in TOO_LARGE else args.shape)
            if num_processes == 2 and sharding in ("zero3_freed", "fsdp2"):
                yield Case(sharding, num_processes, "quarter", beta=0.04)


def step_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases whose steps are timed and whose traffic is counted, on two processes."""
    for sharding in args.shardings:
        yield Case(sharding, 2, args.step_shape, num_timed=args.num_timed)


def launch(case: Case, checkpoint: Path, directory: Path) -> list[dict[str, Any]]:
    """Run a case in processes of its own and return the results of its ranks. Raises CalledProcessError if it fails."""
    work = {"checkpoint": str(checkpoint), **vars(case)}
    file = ROOT / "launch" / "accelerate" / f"{LAUNCH_FILES[case.sharding]}.yaml"
    if case.sharding == "zero3_freed":
        file = with_freed_layers(file, layer_size(checkpoint), directory)
    start = ["-m", "accelerate.commands.launch", *launcher_options(case, file)] if is_launched(case) else []
    output = Path(tempfile.mkdtemp(dir=directory))
    subprocess.run(
        [sys.executable, *start, "benchmarks/sharded_rank.py", json.dumps(work), str(output)],
        cwd=ROOT,
        env=os.environ | RETURN_FREED_MEMORY | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        stdout=sys.stderr,
        check=True,
    )
    return [json.loads((output / f"rank-{rank}.json").read_text()) for rank in range(case.num_processes)]


def is_launched(case: Case) -> bool:
    """Return whether a launcher is needed: not for one process without a sharding."""
    return case.sharding != "ddp" or case.num_processes > 1


def launcher_options(case: Case, file: Path) -> list[str]:
    """Return the options of `accelerate launch`, with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        "--config_file", str(file), "--num_processes", str(case.num_processes), "--main_process_port", str(port),
    ]  # fmt: skip


def with_freed_layers(file: Path, num_kept: int, directory: Path) -> Path:
    """Write a launcher's file whose DeepSpeed config frees layers if more than `num_kept` weights are gathered."""
    import yaml

    batch = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    zero = {"stage": 3, **dict.fromkeys(AUTO_SIZES, "auto"), **dict.fromkeys(FREED, num_kept)}
    deepspeed = directory / "zero3.json"
    deepspeed.write_text(json.dumps({**batch, "zero_optimization": zero}))
    changed = directory / "zero3.yaml"
    content = yaml.safe_load(file.read_text()) | {"deepspeed_config": {"deepspeed_config_file": str(deepspeed)}}
    del content["mixed_precision"]  # accelerate refuses it beside a DeepSpeed config
    changed.write_text(yaml.safe_dump(content))
    return changed


def count_parameters(checkpoint: Path) -> int:
    """Return the number of a checkpoint's weights."""
    return sum(sizes(checkpoint).values())


def layer_size(checkpoint: Path) -> int:
    """Return the number of weights of one layer of the language model."""
    return sum(size for name, size in sizes(checkpoint).items() if name.startswith("model.layers.0."))


def sizes(checkpoint: Path) -> dict[str, int]:
    """Return the number of values of each tensor of a checkpoint, by name."""
    from safetensors.torch import load_file

    return {name: tensor.numel() for name, tensor in load_file(checkpoint / "model.safetensors").items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases, one after the other."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        memory = [measure_case(case, directory) for case in memory_cases(args)]
        steps = [measure_case(case, directory) for case in step_cases(args)]
    found = environment()
    found["versions"]["deepspeed"] = version("deepspeed")
    found["machine"]["threads"] = 1
    return {"benchmark": "sharding", "memory": memory, "steps": steps, **found}


def measure_case(case: Case, directory: Path) -> dict[str, Any]:
    """Measure a case, with checkpoints and files of the launcher in `directory`."""
    print(case.name, file=sys.stderr)
    checkpoint = directory / case.shape
    if not checkpoint.exists():
        build_checkpoint(SHAPES[case.shape], checkpoint)
    ranks, size = launch(case, checkpoint, directory), count_parameters(checkpoint)
    return {"name": case.name, **vars(case), "num_parameters": size, "ranks": ranks}


def main() -> None:
    args = parse()
    measured = measure(args)
    finish(measured, sharding_tables(measured), args)


if __name__ == "__main__":
    main()
