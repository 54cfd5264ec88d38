"""The outcome of an evaluation or an interrupted run, as text for the user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_vlm.checkpoint.store import complete
from rl_vlm.log.changes import Change, interval
from rl_vlm.log.directory import DIFFERENCES, REPORT
from rl_vlm.log.metrics import function_name, is_score, reward_faults

DIGITS = 4
"""Decimals of a score."""


def report_lines(directory: Path) -> list[str]:
    """Return a line that names the report, if there is one."""
    return [f"To see all of it, open {directory / REPORT} in a browser."] if (directory / REPORT).is_file() else []


def interrupted_training(output_dir: str) -> str:
    """Say which checkpoint is the newest, and how to resume from it."""
    found = complete(Path(output_dir))
    if not found:
        return f"Interrupted. There is no checkpoint in {output_dir} to resume from."
    return (
        f"Interrupted. The newest checkpoint is {found[-1]}.\n"
        "To continue from there, repeat the command with resume_from_checkpoint=auto"
    )


def evaluation_outcome(summary: dict[str, Any], output_dir: str) -> str:
    """Describe scores with intervals, reward faults, the requested tables, and where the files are."""
    directory = Path(output_dir) / "evaluation"
    scores = [
        ", ".join([f"{name} {mean_and_interval(summary, name)}", *best_of(summary, name)])
        for name in functions(summary)
    ]
    lines = [
        f"{summary['num_samples']:.0f} samples: {'; '.join(scores) or 'no completion has a score'}. "
        f"Every completion is in {directory / 'completions.parquet'}.",
        *fault_lines(reward_faults(summary)),
    ]
    for column, by_value in summary.get("by", {}).items():
        lines.append(scores_table(column, by_value))
    if "kept" in summary:
        lines.append(kept_line(summary["kept"], directory / "kept.parquet"))
    return "\n".join([*lines, *report_lines(directory)])


def comparison_outcome(summaries: dict[str, dict[str, Any]], output_dir: str) -> str:
    """Describe the scores in a row per checkpoint, the differences from the first, and where the files are."""
    directory = Path(output_dir) / "evaluation"
    lines = [scores_table("checkpoint", summaries), *difference_lines(summaries)]
    lines += [f"{name}: {line}" for name, summary in summaries.items() for line in fault_lines(reward_faults(summary))]
    for name, summary in summaries.items():
        for column, by_value in summary.get("by", {}).items():
            lines.append(scores_table(f"{name}, {column}", by_value))
        if "kept" in summary:
            lines.append(f"{name}: {kept_line(summary['kept'], directory / name / 'kept.parquet')}")
    lines.append(
        f"Both tables are in {directory / 'comparison.json'}, completions are in a folder per checkpoint beside it."
    )
    return "\n".join([*lines, *report_lines(directory)])


def functions(metrics: dict[str, Any]) -> list[str]:
    """Return the reward functions that have scores."""
    return [function_name(metric) for metric in metrics if is_score(metric)]


def mean_and_interval(metrics: dict[str, Any], name: str) -> str:
    mean, low, high = (metrics[f"rewards/{name}/{figure}"] for figure in ("mean", "ci_low", "ci_high"))
    return f"{mean:.{DIGITS}f} (95% interval {low:.3f} to {high:.3f})"


def best_of(metrics: dict[str, Any], name: str) -> list[str]:
    """Return pass@k and majority@k at the largest k, if several completions were sampled."""
    found = []
    for figure in ("pass", "majority"):
        prefix = f"rewards/{name}/{figure}@"
        ks = [int(metric.removeprefix(prefix)) for metric in metrics if metric.startswith(prefix)]
        if ks and max(ks) > 1:
            found.append(f"{figure}@{max(ks)} {metrics[f'{prefix}{max(ks)}']:.4f}")
    return found


def skipped_lines(summary: dict[str, Any]) -> list[str]:
    """Return a line on steps without an update, if there are any."""
    reasons = [
        f"{name.replace('_', ' ')} {count:.0f}" for name, count in summary.get("skipped_updates", {}).items() if count
    ]
    steps = summary["optimizer_steps"]
    return [f"Steps of {steps} that did not update the weights: {', '.join(reasons)}."] if reasons else []


def fault_lines(faults: dict[str, float], which: str = "completions") -> list[str]:
    """Return a line on completions that reward functions failed on, if there are any."""
    counts = [f"{name} {count:.0f}" for name, count in faults.items()]
    return (
        [f"{which.capitalize()} without a score because a reward function failed: {', '.join(counts)}."]
        if counts
        else []
    )


def kept_line(kept: dict[str, Any], path: Path) -> str:
    rates = f"success rate of {kept['low']:g} to {kept['high']:g} by {kept['function']}"
    if not kept["num_samples"]:
        return f"No sample has a {rates}: nothing is kept."
    return f"{kept['num_samples']} samples have a {rates}: train on them with data.dataset_name={path}"


def scores_table(title: str, rows: dict[str, dict[str, Any]]) -> str:
    """Format mean and half the interval's width of each function, in aligned columns."""
    names = list(dict.fromkeys(name for metrics in rows.values() for name in functions(metrics)))
    cells = [[title, "samples", *names]]
    for label, metrics in rows.items():
        cells.append([label, f"{metrics['num_samples']:.0f}", *(mean_and_half_width(metrics, name) for name in names)])
    return f"\n{aligned(cells)}"


def difference_lines(summaries: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table with the changes of scores from the first checkpoint, if there are any. They are paired by row."""
    cells = [[f"compared with {next(iter(summaries))}", "score", "difference", "95% interval", "rows"]]
    for name, summary in summaries.items():
        for change in (Change(**values) for values in summary.get(DIFFERENCES, [])):
            difference = f"{change.after - change.before:+.{DIGITS}f}"
            cells.append([name, change.name, difference, interval(change, DIGITS), str(change.num)])
    return [f"\n{aligned(cells)}"] if len(cells) > 1 else []


def aligned(rows: Sequence[Sequence[str]], figures: bool = False) -> str:
    """Format rows of equal length as columns. `figures` are to the right, in all columns but the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [cell.rjust(widths[i]) if figures and i else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def mean_and_half_width(metrics: dict[str, Any], name: str) -> str:
    """Format as `0.9333 ± 0.024`, or `-` if the function has no score here."""
    if f"rewards/{name}/mean" not in metrics:
        return "-"
    half_width = (metrics[f"rewards/{name}/ci_high"] - metrics[f"rewards/{name}/ci_low"]) / 2
    return f"{metrics[f'rewards/{name}/mean']:.{DIGITS}f} ± {half_width:.3f}"
