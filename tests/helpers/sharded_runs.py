"""Runs on two processes of one sharding, several in one launch, and how closely they agree with runs on one process."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RunConfig
from tests.helpers import mixed_run, tiny_run
from tests.helpers.train_all import train_file
from tests.helpers.two_processes import launch

SHARDINGS = ("ddp", "zero2", "zero3", "zero3_offload", "fsdp2")
MOMENT = "/exp_avg"
NEARLY_ZERO = "k_proj.bias"
"""A weight whose gradient is a rounding error: attention does not depend on a bias of all keys."""


FEW = 10
"""Values of a model whose gradients may be rounding errors as well. AdamW moves such a value by its whole rate, in a
direction of chance: one of them alone was 0.0012 of what training moved."""


def launcher_file(sharding: str, directory: Path) -> Path:
    """Write accelerate's file for a sharding, with everything sharded that it can shard, and return its path."""
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "use_cpu": True, "num_machines": 1, "machine_rank": 0,
        "num_processes": 2, "rdzv_backend": "static", "same_network": True,
    }  # fmt: skip
    if sharding == "ddp":
        settings |= {"distributed_type": "MULTI_GPU"}
    elif sharding == "fsdp2":
        settings |= {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    else:
        deepspeed = directory / f"{sharding}.json"
        deepspeed.write_text(json.dumps(deepspeed_json(sharding)))
        settings |= {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(deepspeed)}}
    path = directory / f"{sharding}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def deepspeed_json(sharding: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 2 if sharding == "zero2" else 3}
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0  # the default leaves tiny models whole
    if sharding == "zero3_offload":
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}


SETTINGS: dict[str, Any] = {
    "dataset_name": mixed_run.UNLIKE_ROWS, "reward_funcs": [mixed_run.REWARD], "shuffle_dataset": False,
    "prompts_per_step": 4, "seed": 3, "micro_batch_tokens": 95, "learning_rate": 1e-3,
    "lr_scheduler_type": "constant", "weight_decay": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Runs:
    """Runs by name, each with a folder of that name in `directory`."""

    directory: Path
    configs: dict[str, RunConfig]

    @staticmethod
    def of(directory: Path, variants: Mapping[str, Mapping[str, Any]]) -> Runs:
        """`variants` are settings of each run beside SETTINGS; `checkpoint` is the model that it starts from."""
        directory.mkdir(exist_ok=True)
        configs = {}
        for name, settings in variants.items():
            own = {**SETTINGS, **settings}
            configs[name] = tiny_run.make_config(own.pop("checkpoint"), directory / name, **own)
        return Runs(directory, configs).write()

    def write(self) -> Runs:
        """Write a config file for each run."""
        for name, config in self.configs.items():
            (self.directory / f"{name}.yaml").write_text(to_yaml(config))
        return self

    @property
    def files(self) -> list[Path]:
        return [self.directory / f"{name}.yaml" for name in self.configs]

    def train(self) -> Runs:
        """Train all in this process."""
        for file in self.files:
            train_file(file)
        return self

    def launch(self, sharding: str) -> Runs:
        """Train all on two processes. If a run hangs, those before it are complete."""
        file = launcher_file(sharding, self.directory)
        arguments = ["--config_file", str(file), "-m", "tests.helpers.train_all", *map(str, self.files)]
        try:
            result = launch(*arguments, timeout=120 + 60 * len(self.configs))
            log = result.stdout + result.stderr
        except subprocess.TimeoutExpired as hang:
            log = f"{hang}\n{hang.stdout}\n{hang.stderr}"
        (self.directory / "log").write_text(log)
        return self

    def __getitem__(self, name: str) -> Path:
        """The directory of a run that is complete."""
        directory = self.directory / name
        assert (directory / "summary.json").is_file(), (self.directory / "log").read_text()[-5000:]
        return directory


@dataclass(frozen=True)
class Differences:
    """The largest differences between two runs."""

    losses: float
    norms: float
    """Of all gradients before they are clipped."""
    gradients: float
    """Of the first step, relative to each tensor's norm."""
    weights: float
    """Norm of the difference after each step, without the `FEW` largest values, relative to what training moved from
    the first step to the last."""


def differences(expected: Path, run: Path) -> Differences:
    """Compare two runs. Their steps, and the completions that they sampled, must be the same."""
    expected_lines, lines = tiny_run.metric_lines(expected), tiny_run.metric_lines(run)
    assert [line["step"] for line in lines] == [line["step"] for line in expected_lines]
    assert sampled(run) == sampled(expected)
    pairs = list(zip(lines, expected_lines, strict=True))
    losses = max(gap(line["loss"], other["loss"]) for line, other in pairs)
    norms = max(gap(line["grad_norm"], other["grad_norm"]) for line, other in pairs)
    names = [f"checkpoint-{line['step']}" for line in lines]
    moved = distance(tiny_run.weights(expected / names[0]), tiny_run.weights(expected / names[-1]))
    pairs_of_weights = [(tiny_run.weights(expected / name), tiny_run.weights(run / name)) for name in names]
    weights = max(distance(*both, without_largest=FEW) for both in pairs_of_weights) / moved
    return Differences(losses, norms, gradient_difference(first_gradients(expected), first_gradients(run)), weights)


def gap(value: float, other: float) -> float:
    """The difference; 0 if neither is finite."""
    return abs(value - other) if math.isfinite(value) or math.isfinite(other) else 0.0


def sampled(run: Path) -> dict[tuple[str, int], tuple[str, float]]:
    """Text and advantage of every completion by group and index; in the files each rank's rows come together."""
    rows = [row for rows in tiny_run.completions(run).values() for row in rows]
    return {(row["group_id"], row["completion_index"]): (row["completion"], row["advantage"]) for row in rows}


def distance(weights: dict[str, Tensor], others: dict[str, Tensor], without_largest: int = 0) -> float:
    """The norm of the difference, without the largest differences of single values."""
    assert weights.keys() == others.keys()
    differences = torch.cat([(weights[name] - others[name]).double().flatten().abs() for name in weights])
    return float(differences.sort(descending=True).values[without_largest:].norm())


def first_gradients(run: Path) -> dict[str, Tensor]:
    """The clipped gradients of the first step: AdamW's first moments are 0.1 of them then."""
    files = sorted((run / "checkpoint-1" / "optimizer").glob("*.safetensors"))
    states = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name.removesuffix(MOMENT): 10 * tensor for name, tensor in states.items() if name.endswith(MOMENT)}


def gradient_difference(expected: dict[str, Tensor], gradients: dict[str, Tensor]) -> float:
    assert gradients.keys() == expected.keys()
    compared = {name: g for name, g in expected.items() if not name.endswith(NEARLY_ZERO) and g.norm() > 0}
    return max(float((gradients[name] - gradient).norm() / gradient.norm()) for name, gradient in compared.items())
