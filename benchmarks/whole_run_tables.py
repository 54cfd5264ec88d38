"""The table and the chart of benchmarks/whole_run.py."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import markdown_table

Results = Sequence[dict[str, Any]]
SIDES = ("ours", "trl")
STAGES = ("rollout", "rewards", "log-probs", "training", "other")


def whole_run_table(results: Results) -> str:
    """Format three lines per case: the medians of each side's seconds per window, and their ratio."""
    head = ["whole run", "side", *STAGES, "window", "peak MiB", "mean reward, first and last window"]
    rows = []
    for r in results:
        sides = {name: [*stage_medians(r, name).values(), window_median(r, name)] for name in r["seconds"]}
        for name, seconds in sides.items():
            first, *_, last = r["reward"][name]
            memory = f"{r['peak_memory_bytes'][name] / 2**20:.0f}"
            rows.append([case_name(r), name, *(f"{s:.3g}" for s in seconds), memory, f"{first:.2f}, {last:.2f}"])
        ratios = [
            f"{trl / ours:.2f}×" if min(ours, trl) > 1e-4 else "" for ours, trl in zip(*sides.values(), strict=True)
        ]
        ratios[-1] = f"**{r['speedup_vs_peer']:.2f}×**"
        rows.append(["", "trl / ours", *ratios, f"{1 / r['peak_memory_vs_peer']:.2f}×", ""])
    return markdown_table(head, rows)


def case_name(result: dict[str, Any]) -> str:
    work = result["workload"]
    sizes = f"{work['image_tokens']} image, {work['completion_tokens']} new tokens"
    return f"{work['shape']}: {work['prompts_per_step']} x {work['num_generations']}, {sizes}"


def stage_medians(result: dict[str, Any], side: str) -> dict[str, float]:
    """Return the median seconds of each stage over all windows but the first."""
    windows = result["seconds"][side][1:]
    return {stage: median(window[stage] for window in windows) for stage in STAGES}


def window_median(result: dict[str, Any], side: str) -> float:
    return median(sum(window.values()) for window in result["seconds"][side][1:])


def whole_run_chart(results: Results, pyplot: Any) -> Any:
    """Draw the seconds of each stage and, in a row per case, both learning curves."""
    figure, all_axes = pyplot.subplots(len(results), 2, figsize=(10, 2.6 * len(results)), squeeze=False)
    for (times, curves), r in zip(all_axes, results, strict=True):
        medians = {side: stage_medians(r, side) for side in r["seconds"]}
        left = [0.0] * len(medians)
        for stage in STAGES:
            widths = [seconds[stage] for seconds in medians.values()]
            times.barh(list(medians), widths, left=left, label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        times.invert_yaxis()
        times.set_title(case_name(r), fontsize=9)
        times.set_xlabel("seconds per window")
        for side, rewards in r["reward"].items():
            curves.plot(range(1, len(rewards) + 1), rewards, "o-", markersize=3, label=side)
        curves.set_xlabel("window")
        curves.set_ylabel("mean reward")
        curves.legend(fontsize=7)
    all_axes[0][0].legend(fontsize=7)
    return figure
