"""Output of results, and the tables and charts of docs/benchmarks.md from the results in docs/benchmarks/*.json.

    python benchmarks/report.py

A table stands between `<!-- NAME -->` and `<!-- end -->`; the text around it is written by hand. Each table has a
chart, docs/images/benchmark_NAME.png. The benchmarks import this module, which imports none of them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import ROOT, markdown_table
from benchmarks.flops import SWEEPS
from benchmarks.sharding_tables import sharding_chart, sharding_tables
from benchmarks.whole_run_tables import whole_run_chart, whole_run_table

RESULTS = ROOT / "docs" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
Results = Sequence[dict[str, Any]]


def result_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--docs", metavar="NAME", help="keep it as docs/benchmarks/NAME.json and redraw the page")


def finish(result: dict[str, Any], table: str, arguments: argparse.Namespace) -> None:
    """Print the table; write the result if `--json` is given; keep it and redraw the page if `--docs` is given."""
    print(table)
    text = json.dumps(result, indent=1) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
    if arguments.docs:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{arguments.docs}.json").write_text(text)
        update_page()


def run_benchmark(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    measure_memory: Callable[[argparse.Namespace], int],
    table: Callable[[dict[str, Any]], str],
) -> None:
    """Measure and report; in the fresh process of one side (`--memory-of`), print the bytes for `in_fresh_process`."""
    if args.memory_of:
        print(json.dumps(measure_memory(args)))
        return
    measured = measure(args)
    finish(measured, table(measured), args)


def update_page() -> None:
    """Redraw the tables and charts that have results. Raises ValueError if the page has no place for a table."""
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
    """Return the page's text with `table` between the marks of `name`. Raises ValueError if it has no such marks."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(text):
        raise ValueError(f"{PAGE} has no <!-- {name} --> … <!-- end -->")
    return marks.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


def measured_on(results: Results) -> str:
    """Describe the machines and versions in one line."""
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
    """Name the settings that distinguish a training pass from the others."""
    work = result["workload"]
    parts = {
        f"vs {result['peer']}, G = {work['num_generations']}": True,
        work["shape"]: work["shape"] != "small",
        "LoRA": work["lora"],
        f"beta {work['beta']}": work["beta"],
    }
    return ", ".join(part for part, is_named in parts.items() if is_named)


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
    """Draw the speed-up of each case with its ceiling, rho, and the speed-up of the floor."""
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


def compared_table(results: Results) -> str:
    """Draw the table of a benchmark that compares one side with others."""
    head = ["group", "ρ", "speed-up", "FLOP ceiling", "share", "memory", "gradient Δ"]
    keys = ("speedup_vs", "flop_ceiling", "share_of_ceiling", "peak_memory_vs")
    rows = [
        [
            peer_name(r, peer),
            f"{r['token_ratio']:.2f}",
            *(f"{r[key][peer]:.2f}" for key in keys),
            f"{r['differences'][peer]['gradient']:.0e}",
        ]
        for r in results
        for peer in r["speedup_vs"]
    ]
    return markdown_table(head, rows)


def peer_name(result: dict[str, Any], peer: str) -> str:
    work = result["workload"]
    tokens = f"{work['image_tokens']:,} video tokens, " if work.get("num_frames") else ""
    return f"vs {peer}, {tokens}G = {work['num_generations']}"


def compared_chart(results: Results, pyplot: Any) -> Any:
    """Draw the speed-up over each peer, with its FLOP ceiling."""
    bars = [
        (peer_name(r, peer), r["speedup_vs"][peer], r["flop_ceiling"][peer])
        for r in results
        for peer in r["speedup_vs"]
    ]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.5 * len(bars)))
    names, speedups, ceilings = zip(*bars, strict=True)
    axes.barh(names, speedups, color="tab:blue", height=0.6, label="measured")
    axes.plot(ceilings, range(len(bars)), "k|", markersize=24, label="FLOP ceiling")
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the peer")
    axes.legend(fontsize=8, markerscale=0.5)
    return figure


def rollout_table(results: Results) -> str:
    head = ["rollout", "prefill FLOPs saved", "prefill faster", "whole rollout faster"]
    keys = ("prefill_work_vs_generate", "prefill_speedup", "rollout_speedup")
    return markdown_table(head, [[rollout_name(r), *(f"{r[key]:.2f}×" for key in keys)] for r in results])


def rollout_name(result: dict[str, Any]) -> str:
    work = result["workload"]
    return f"G = {work['num_generations']}, {work['image_tokens']} image, {work['completion_tokens']} new tokens"


def rollout_chart(results: Results, pyplot: Any) -> Any:
    """Draw the seconds of prefill and of the other tokens for both sides."""
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
    head = ["sweep", "G", "image", "completion", "shared s", "dense s", "dense/shared", "FLOPs", "rho", "vs floor"]
    rows = [
        [
            point["sweep"],
            point["num_generations"],
            point["image_tokens"],
            point["completion_tokens"],
            *(f"{median(point['seconds'][side]):.2f}" for side in ("shared", "dense")),
            *(f"{point[key]:.2f}" for key in ("measured_ratio", "flop_ratio", "token_ratio", "time_vs_floor")),
        ]
        for point in results[-1]["points"]
    ]
    return markdown_table(head, rows)


def scaling_chart(results: Results, pyplot: Any) -> Any:
    """Draw dense over shared time beside theory along each sweep, and shared time over the floor's."""
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
    rows = [
        [
            name,
            *(f"{1e3 * median(case['seconds'][form]):.1f}" for form in ("conv", "linear")),
            f"{case['speedup']:.2f}",
            f"{case['max_output_difference']:.0e}",
            f"{case['max_gradient_difference']:.0e}",
        ]
        for name, case in results[-1]["cases"].items()
    ]
    return markdown_table(["patch embedding", "conv ms", "linear ms", "conv/linear", "largest Δ", "gradient Δ"], rows)


def patch_embed_chart(results: Results, pyplot: Any) -> Any:
    """Draw the milliseconds of both forms."""
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
    "trajectories": (compared_table, compared_chart),
    "video": (compared_table, compared_chart),
    "rollout": (rollout_table, rollout_chart),
    "scaling": (scaling_table, scaling_chart),
    "patch_embed": (patch_embed_table, patch_embed_chart),
    "whole_run": (whole_run_table, whole_run_chart),
    "sharding": (lambda results: sharding_tables(results[-1]), sharding_chart),
}
"""Table and chart of each benchmark, by its name."""


if __name__ == "__main__":
    update_page()
