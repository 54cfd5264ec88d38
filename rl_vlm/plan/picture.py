"""The memory plan as a picture: one stacked bar per phase, and the line that the card offers."""

from __future__ import annotations

from pathlib import Path

from rl_vlm.plan.hardware import GIB
from rl_vlm.plan.memory import MemoryPlan, part_names


def draw_plan(plan: MemoryPlan, path: Path) -> None:
    """Write a PNG or SVG file, by the ending of `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    labels = [phase.name for phase in plan.phases]
    below = [0.0] * len(labels)
    for name in part_names(plan.phases):
        sizes = [phase.parts.get(name, 0) / GIB for phase in plan.phases]
        axes.bar(labels, sizes, bottom=below, label=name)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    axes.axhline(plan.available / GIB, color="black", linestyle="--", label="what the card offers")
    axes.set_ylabel("GiB per GPU")
    axes.set_title(f"{plan.card.name}, {plan.engine.name}, {plan.num_ranks} GPUs")
    figure.legend(loc="outside right upper")
    figure.savefig(path)
