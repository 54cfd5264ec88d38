"""Tables and charts of docs/benchmarks.md from the results in docs/benchmarks/*.json.

    python benchmarks/report.py

A table stands between `<!-- NAME -->` and `<!-- end -->`; the text around it is written by hand. Each table has its
chart, docs/images/benchmark_NAME.png.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import RESULTS, ROOT, markdown_table

PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
Results = Sequence[dict[str, Any]]


def update_page() -> None:
    """Redraw what there are results for. Raises ValueError if the page has no place for a table."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    text = PAGE.read_text()
    for name, (table, chart) in REPORTS.items():
        found = [result for result in results if result["benchmark"] == name]
        if not found:
            continue
        text = fill(text, name, table(found) + "\n\n" + measured_on(found))
        save_chart(chart, found, IMAGES / f"benchmark_{name}.png")
    PAGE.write_text(text)


def fill(text: str, name: str, table: str) -> str:
    """The page's text with another table between the marks of `name`."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(text):
        raise ValueError(f"{PAGE} has no <!-- {name} --> … <!-- end -->")
    return marks.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


def measured_on(results: Results) -> str:
    """One line on machine and versions."""
    lines = {
        f"{r['machine']['cpu']}, {r['machine']['threads']} threads, {r['machine']['dtype']}; "
        + ", ".join(f"{name} {version}" for name, version in r["versions"].items())
        for r in results
    }
    return "Measured on " + "; ".join(sorted(lines)) + "."


def save_chart(chart: Any, results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = chart(results, pyplot)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def case_name(result: dict[str, Any]) -> str:
    """What sets a training pass apart from the others."""
    work = result["workload"]
    parts = [f"vs {result['peer']}, G = {work['num_generations']}"]
    return ", ".join([*parts, *(["LoRA"] if work["lora"] else []), *([f"beta {work['beta']}"] if work["beta"] else [])])


def train_step_table(results: Results) -> str:
    head = ["training pass", "speed-up", "FLOP ceiling", "share", "memory", "time / floor", "gradient Δ"]
    rows = [
        [
            case_name(r),
            *(f"{r[key]:.2f}" for key in ("speedup_vs_peer", "flop_ceiling", "share_of_ceiling")),
            *(f"{r[key]:.2f}" for key in ("peak_memory_vs_peer", "time_vs_floor")),
            f"{r['differences']['gradient']:.0e}",
        ]
        for r in results
    ]
    return markdown_table(head, rows)


def train_step_chart(results: Results, pyplot: Any) -> Any:
    """Speed-up of each case beside its ceiling, rho, and what the floor would reach."""
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.6 * len(results)))
    places = range(len(results))
    axes.barh(places, [r["speedup_vs_peer"] for r in results], color="tab:blue", height=0.6, label="measured")
    marks = {
        "FLOP ceiling": ("k|", [r["flop_ceiling"] for r in results]),
        "floor": ("gD", [r["speedup_vs_peer"] * r["time_vs_floor"] for r in results]),
        "ρ (language tokens alone)": ("rx", [r["token_ratio"] for r in results]),
    }
    for label, (style, values) in marks.items():
        axes.plot(values, places, style, markersize=24 if style == "k|" else 6, label=label)
    axes.set_yticks(places, [case_name(r) for r in results])
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the peer")
    axes.legend(
        fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1 + 1 / (1 + len(results))), ncols=4, markerscale=0.5
    )
    return figure


def rollout_table(results: Results) -> str:
    head = ["rollout", "prefill FLOPs saved", "prefill faster", "whole rollout faster"]
    keys = ("prefill_work_vs_generate", "prefill_speedup", "rollout_speedup")
    return markdown_table(head, [[rollout_name(r), *(f"{r[key]:.2f}×" for key in keys)] for r in results])


def rollout_name(result: dict[str, Any]) -> str:
    work = result["workload"]
    return f"G = {work['num_generations']}, {work['image_tokens']} image, {work['completion_tokens']} new tokens"


def rollout_chart(results: Results, pyplot: Any) -> Any:
    """Seconds of prefill and of what follows, for both sides."""
    bars = [(f"{rollout_name(r)}: {side}", r["seconds"], side) for r in results for side in ("ours", "generate")]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.5 * len(bars)))
    names = [name for name, _, _ in bars]
    prefill = [median(seconds["prefill"][side]) for _, seconds, side in bars]
    whole = [median(seconds["rollout"][side]) for _, seconds, side in bars]
    axes.barh(names, prefill, label="prefill and first token")
    axes.barh(names, [w - p for w, p in zip(whole, prefill, strict=True)], left=prefill, label="other tokens")
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(fontsize=8)
    return figure


def scaling_table(results: Results) -> str:
    from benchmarks.scaling import table

    return table(results[-1])


def scaling_chart(results: Results, pyplot: Any) -> Any:
    """Dense over shared, beside theory, along each sweep; and the shared time over the floor's."""
    from benchmarks.scaling import SWEEPS

    found = results[-1]["points"]
    figure, all_axes = pyplot.subplots(1, len(SWEEPS), figsize=(11, 3.6))
    lines = {
        "measured_ratio": ("o-", "dense / shared, measured"),
        "flop_ratio": ("k--", "FLOPs"),
        "token_ratio": ("r:", "ρ = k(P+R)/(P+kR)"),
        "time_vs_floor": ("g^-", "shared / floor"),
    }
    for axes, sweep in zip(all_axes, SWEEPS, strict=True):
        points = [point for point in found if point["sweep"] == sweep]
        for key, (style, label) in lines.items():
            axes.plot([p[sweep] for p in points], [p[key] for p in points], style, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks([p[sweep] for p in points], [str(p[sweep]) for p in points])
        axes.set_xlabel(sweep.replace("_", " "))
        axes.set_ylim(bottom=0)
    all_axes[0].legend(fontsize=7)
    return figure


def patch_embed_table(results: Results) -> str:
    from benchmarks.patch_embed import table

    return table(results[-1])


def patch_embed_chart(results: Results, pyplot: Any) -> Any:
    """Milliseconds of both forms."""
    cases = results[-1]["cases"]
    figure, axes = pyplot.subplots(figsize=(8, 3))
    for offset, form in ((-0.2, "conv"), (0.2, "linear")):
        times = [1e3 * median(case["seconds"][form]) for case in cases.values()]
        axes.barh([place + offset for place in range(len(cases))], times, height=0.4, label=form)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, forward and backward")
    axes.legend(fontsize=8)
    return figure


REPORTS: dict[str, tuple[Any, Any]] = {
    "train_step": (train_step_table, train_step_chart),
    "rollout": (rollout_table, rollout_chart),
    "scaling": (scaling_table, scaling_chart),
    "patch_embed": (patch_embed_table, patch_embed_chart),
}
"""By the name of the benchmark: its table and its chart."""


if __name__ == "__main__":
    update_page()
