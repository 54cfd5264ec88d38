"""Time of a training step on 1 to 32 machines, by arithmetic: from bandwidths, and the bytes measured on two processes.

    python -m benchmarks.scaling_model
    python -m benchmarks.scaling_model --docs            # write the tables of docs/distributed.md

A step has micro-batches of a number of tokens. Computing takes tokens x FLOPs / (GPU's FLOP/s x share that is reached),
and as much longer as the slowest of R ranks is expected to be: 1 + c sqrt(2 ln R) for a coefficient of variation c.
Communication takes the bytes that a rank sends on a ring over its bandwidth: within a machine that of NVLink, between
machines at most that of all of a machine's network cards, which all rings share. Nothing is hidden behind computing, so
that times are upper bounds. Sampling is left out, and so are weights that are sent to vLLM.

Weak scaling keeps the micro-batches of a rank, so that a step has more prompts on more machines. Strong scaling keeps
those of a step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import ROOT, markdown_table

NODES = (1, 2, 4, 8, 16, 32)
GPUS = 8
NETWORKS = {"8 x 400 Gb/s": 400e9, "1 x 400 Gb/s": 50e9, "100 Gb/s": 12.5e9}
"""Bytes per second of a machine's network cards."""
LINEAR = 0.85
"""Efficiency at which scaling counts as lost."""
MEASURED = ROOT / "docs" / "benchmarks" / "sharding.json"
PAGE = ROOT / "docs" / "distributed.md"


@dataclass(frozen=True)
class Sharding:
    """How ranks hold the model."""

    label: str
    key: str
    """Its name in the measurement."""
    is_lora: bool = False


SHARDINGS = (Sharding("DDP, LoRA", "ddp", True), Sharding("ZeRO-3", "zero3_freed"), Sharding("FSDP2", "fsdp2"))


@dataclass(frozen=True)
class Assumptions:
    """What the model takes as given."""

    weights: float = 8.3e9
    """Of Qwen2.5-VL-7B."""
    adapter: float = 0.19e9
    """Trained with LoRA of rank 64."""
    bytes_per_weight: float = 4.0
    """Trained weights are held, gathered and reduced in float32."""
    tokens: float = 16384.0
    """Of a micro-batch."""
    micro_batches: int = 8
    """Of a rank on one machine."""
    flops: float = 989e12
    """Of a GPU per second, in bfloat16: H100."""
    reached: float = 0.4
    nvlink: float = 450e9
    """Bytes that a GPU sends per second within a machine."""
    variation: float = 0.03
    """Coefficient of variation of the ranks' times."""


def measured_units(measured: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return what a rank sends in each step, and for each micro-batch, in units of (R - 1) / R of the trained weights.

    They follow from steps of 1 and of 3 micro-batches.
    """
    units = {}
    for case in measured["steps"]:
        ring = 4 * case["num_parameters"] * (case["num_processes"] - 1) / case["num_processes"]
        one, three = (case["ranks"][0]["traffic"][number]["sent"] / ring for number in ("1", "3"))
        units[case["sharding"]] = (one - (three - one) / 2, (three - one) / 2)
    return units


def step_seconds(
    sharding: Sharding, units: tuple[float, float], nodes: int, network: float, given: Assumptions, is_strong: bool
) -> float:
    """Return the seconds of a step."""
    ranks = nodes * GPUS
    micro_batches = given.micro_batches / nodes if is_strong else float(given.micro_batches)
    per_token = (
        6 if sharding.is_lora else 8
    ) * given.weights  # forward, recomputation, and a backward of 1 or 2 forwards
    computing = micro_batches * given.tokens * per_token / (given.flops * given.reached)
    computing *= 1 + given.variation * math.sqrt(2 * math.log(ranks))
    trained = given.bytes_per_weight * (given.adapter if sharding.is_lora else given.weights)
    sent = (units[0] + units[1] * max(1, math.ceil(micro_batches))) * trained * (ranks - 1) / ranks
    return computing + sent / (given.nvlink if nodes == 1 else min(given.nvlink, network))


def efficiencies(
    sharding: Sharding, units: tuple[float, float], network: float, given: Assumptions, is_strong: bool
) -> list[tuple[float, float]]:
    """Return the seconds of a step and the efficiency relative to one machine, for each number of machines."""
    seconds = [step_seconds(sharding, units, nodes, network, given, is_strong) for nodes in NODES]
    ideal = [seconds[0] / nodes if is_strong else seconds[0] for nodes in NODES]
    return [(actual, best / actual) for actual, best in zip(seconds, ideal, strict=True)]


def table(units: dict[str, tuple[float, float]], given: Assumptions, is_strong: bool) -> str:
    """Return the table of weak or strong scaling."""
    rows = []
    for sharding in SHARDINGS:
        for name, network in NETWORKS.items():
            found = efficiencies(sharding, units[sharding.key], network, given, is_strong)
            lost = next((str(nodes) for nodes, (_, share) in zip(NODES, found, strict=True) if share < LINEAR), "not")
            rows.append([sharding.label, name, *(f"{seconds:.1f} s, {share:.2f}" for seconds, share in found), lost])
    kind = "strong scaling" if is_strong else "weak scaling"
    return markdown_table([kind, "network of a machine", *map(str, NODES), f"below {LINEAR} from"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Assumptions()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--docs", action="store_true", help="write the tables of docs/distributed.md")
    options = vars(parser.parse_args(arguments))
    writes = options.pop("docs")
    units, given = measured_units(json.loads(MEASURED.read_text())), Assumptions(**options)
    tables = "\n\n".join(table(units, given, is_strong) for is_strong in (False, True))
    print(tables)
    if writes:
        from benchmarks.report import fill

        PAGE.write_text(fill(PAGE.read_text(), "scaling_model", tables))


if __name__ == "__main__":
    main()
