"""The tables and the chart of benchmarks/sharding.py. Bytes are in units of the model's weights, 4P."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.common import markdown_table

SHARDINGS = {"ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3_freed": "ZeRO-3, freed", "fsdp2": "FSDP2"}
PARTS = ("weights", "copies", "reference", "gradients", "moments")
COPIES_WEIGHTS = ("zero2", "zero3", "zero3_freed")
"""Shardings that update a float32 copy of this rank's weights, also if the weights are float32 themselves."""


def theory(sharding: str, num_processes: int, has_reference: bool) -> dict[str, float]:
    """Return what each process should hold, in units of the weights."""
    share = 1 / num_processes
    return {
        "weights": 1.0 if sharding in ("ddp", "zero2") else share,
        "copies": share if sharding in COPIES_WEIGHTS else 0.0,
        "reference": share if has_reference else 0.0,
        "gradients": 1.0 if sharding == "ddp" else share,
        "moments": 2.0 if sharding == "ddp" else 2 * share,
    }


def theory_of_traffic(sharding: str, num_micro_batches: int) -> int:
    """Return what each process should send in a step, in units of (N - 1) / N of the weights."""
    return {
        "ddp": 2,  # an all-reduce in the last micro-batch
        "zero2": 2 * num_micro_batches + 1,  # an all-reduce in each, and an all-gather of the updated weights
        "zero3": 2 * num_micro_batches,  # an all-gather and a reduce-scatter
        "zero3_freed": 3 * num_micro_batches,  # all-gathers for forward and backward, and a reduce-scatter
        "fsdp2": 3 * num_micro_batches,
    }[sharding]


def held(case: dict[str, Any]) -> dict[str, float]:
    """Return the bytes that the tensors of a rank hold, by part, as means over ranks."""
    ranks = [rank["held"] for rank in case["ranks"]]
    found = {part: mean(rank.get(part, 0) for rank in ranks) for part in PARTS if part != "gradients"}
    found["gradients"] = mean(rank["live after backward"] for rank in ranks) - sum(found.values())
    return found


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def sharding_tables(result: dict[str, Any]) -> str:
    """Format what was measured of memory, of loading and saving, and of traffic and time."""
    tables = [*([memory_table, files_table] if result["memory"] else []), traffic_table]
    return "\n\n".join(table(result) for table in tables)


def unit(case: dict[str, Any]) -> float:
    """Return the bytes of the weights of a case's model."""
    return 4 * case["num_parameters"]


def memory_table(result: dict[str, Any]) -> str:
    head = ["memory per process", *PARTS, "sum", "theory", "resident", "peak"]
    rows = []
    for case in result["memory"]:
        one, found = unit(case), held(case)
        expected = theory(case["sharding"], case["num_processes"], case["beta"] > 0)
        resident = mean(rank["after"]["backward"] for rank in case["ranks"]) / one
        peak = max(rank["peaks"][stage]["anonymous"] for rank in case["ranks"] for stage in ("backward", "update"))
        parts = [f"{found[part] / one:.2f}" if found[part] else "" for part in PARTS]
        sums = [f"{value:.2f}" for value in (sum(found.values()) / one, sum(expected.values()), resident, peak / one)]
        rows.append([case["name"], *parts, *sums])
    return markdown_table(head, rows)


def files_table(result: dict[str, Any]) -> str:
    head = ["loading and saving", "loading, rank 0", "with mapped file", "other ranks", "saving, rank 0", "other ranks"]
    rows = []
    for case in result["memory"]:
        one, ranks = unit(case), case["ranks"]

        def of_ranks(value: Callable[[dict[str, Any]], float], one: float = one, ranks: Any = ranks) -> list[str]:
            first, *others = (value(rank) / one for rank in ranks)
            return [f"{first:.2f}", f"{max(others):.2f}" if others else ""]

        loading = of_ranks(lambda rank: max(rank["peaks"][stage]["anonymous"] for stage in ("loading", "reference")))
        with_files = max(ranks[0]["peaks"][stage]["with files"] for stage in ("loading", "reference")) / one
        saving = of_ranks(lambda rank: rank["peaks"]["saving"]["anonymous"] - rank["before_saving"])
        rows.append([case["name"], loading[0], f"{with_files:.2f}", loading[1], *saving])
    return markdown_table(head, rows)


def traffic_table(result: dict[str, Any]) -> str:
    head = ["traffic, 2 processes", "1 micro-batch", "theory", "3 micro-batches", "theory", "within rollouts", "after"]
    clocks = ("passed", "computed")
    seconds = {c["sharding"]: [median(c["ranks"][0]["seconds"][k]) for k in clocks] for c in result["steps"]}
    rows = []
    for case in result["steps"]:
        one, num_processes, rank = unit(case), case["num_processes"], case["ranks"][0]
        ring = one * (num_processes - 1) / num_processes
        row = [SHARDINGS[case["sharding"]]]
        for n in (1, 3):
            row += [f"{rank['traffic'][str(n)]['sent'] / ring:.2f}", str(theory_of_traffic(case["sharding"], n))]
        gathered = rank["gathered"]
        row += [f"{(gathered[when] - gathered['before']) / one:+.2f}" for when in ("within", "after")]
        pairs = zip(seconds[case["sharding"]], seconds.get("ddp", []), strict=False)
        rows.append([*row, *(f"{ours / ddp:.2f}" for ours, ddp in pairs)])
    return markdown_table([*head, *(["time / DDP", "CPU time / DDP"] if "ddp" in seconds else [])], rows)


def sharding_chart(results: Sequence[dict[str, Any]], pyplot: Any) -> Any:
    """Draw what each process holds, part by part, with a mark at the theory."""
    cases = results[-1]["memory"]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.35 * len(cases)))
    names, left = [case["name"] for case in cases], [0.0] * len(cases)
    for part in PARTS:
        sizes = [held(case)[part] / unit(case) for case in cases]
        axes.barh(names, sizes, left=left, height=0.6, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    expected = [sum(theory(c["sharding"], c["num_processes"], c["beta"] > 0).values()) for c in cases]
    axes.plot(expected, names, "k|", markersize=12, label="theory")
    axes.invert_yaxis()
    axes.set_xlabel("bytes per process, in units of the weights")
    axes.legend(fontsize=8)
    return figure
