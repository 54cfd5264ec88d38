"""The reward curve: training reward and held-out scores over optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_vlm.log.metrics import function_name, is_score


def draw_curve(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the lines of `metrics.jsonl` to a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    rewards, scores = figure.subplots(1, 2)
    rewards.set(title="training reward", xlabel="optimizer step")
    rewards.plot(*series(lines, "reward"), color="tab:blue")
    scores.set(title="score by reward function", xlabel="optimizer step")
    names = sorted({name for line in lines for name in line if is_score(name)})
    functions = sorted(set(map(function_name, names)))
    for name in names:
        held_out, function = name.startswith("eval_"), function_name(name)
        color = f"C{functions.index(function)}"
        style = {"marker": "o", "linewidth": 2} if held_out else {"linewidth": 1, "alpha": 0.6}
        label = f"{function} (held out)" if held_out else f"{function} (training)"
        scores.plot(*series(lines, name), color=color, label=label, **style)
    if names:
        scores.legend()
    for axes in (rewards, scores):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def series(lines: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values at which a metric was measured."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
