"""The memory plan as a picture: one stacked bar per phase, and a line at the memory that the card offers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_vlm.errors import ConfigError
from rl_vlm.log.files import check_output, output
from rl_vlm.plan.hardware import GIB

if TYPE_CHECKING:
    from rl_vlm.plan.memory import MemoryPlan

FORMATS = ("png", "svg", "pdf")
OPTION = "--picture"


def check_picture(path: Path) -> None:
    """Raise ConfigError if no picture can be written to `path`. Call this before making the plan."""
    check_output(path, OPTION)
    if format_of(path) not in FORMATS:
        raise ConfigError(f"{OPTION} {path} has no ending of a picture: .{', .'.join(FORMATS)}")


def format_of(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()


def draw_plan(plan: MemoryPlan, path: Path) -> None:
    """Draw the plan to `path`, in the format of its ending. Raises ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    from rl_vlm.plan.memory import part_names

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
    axes.set_title(f"{plan.card.name}, {plan.sharding.name}, {plan.num_ranks} GPUs")
    figure.legend(loc="outside right upper")
    with output(path, OPTION) as file:
        figure.savefig(file, format=format_of(path))
