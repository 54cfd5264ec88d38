"""The memory plan as a picture in the style of the report: whether it fits, and a bar per phase."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.errors import ConfigError
from rl_vlm.log.files import check_output, output
from rl_vlm.plan.hardware import GIB

if TYPE_CHECKING:
    from rl_vlm.plan.memory import MemoryPlan

FORMATS = ("png", "svg", "pdf")
OPTION = "--picture"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b87d00", "#2f8fc9", "#6b6b6b", "#8f8200")
TEXT, QUIET, LINE, GOOD, BAD = "#1b1f24", "#59636e", "#d8dde3", "#14713f", "#b3261e"
FONTS = ("Segoe UI", "Roboto", "Noto Sans", "Helvetica Neue", "Arial")
"""Colours and fonts of `page.css` in rl_vlm/tools/report/."""


def check_picture(path: Path) -> None:
    """Raise ConfigError if no picture can be written to `path`. Call this before making the plan."""
    check_output(path, OPTION)
    if format_of(path) not in FORMATS:
        raise ConfigError(f"{OPTION} {path} has no ending of a picture: .{', .'.join(FORMATS)}")


def format_of(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()


def draw_plan(plan: MemoryPlan, path: Path) -> None:
    """Draw the plan to `path`, in the format of its ending. Raises ConfigError if it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"font.family": font(), "font.size": 11}
    style |= {"text.color": TEXT, "xtick.color": QUIET, "ytick.color": TEXT}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 2.4 + 0.45 * len(plan.phases)), layout="constrained", facecolor="white")
        axes = figure.subplots()
        draw_phases(plan, axes)
        figure.suptitle(headline(plan), x=0.01, ha="left", fontsize=17, fontweight="bold", color=color_of(plan))
        axes.set_title(subtitle(plan), loc="left", fontsize=10.5, color=QUIET, x=0.0, pad=22)
        figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9.5)
        with output(path, OPTION) as file:
            figure.savefig(file, format=format_of(path))


def draw_phases(plan: MemoryPlan, axes: Any) -> None:
    """Draw a bar per phase, the first at the top, with its total, and a line at the memory that may be used."""
    from rl_vlm.plan.memory import part_names

    names = [phase.name.replace("_", " ") for phase in plan.phases]
    left = [0.0] * len(names)
    for i, part in enumerate(part_names(plan.phases)):
        sizes = [phase.parts.get(part, 0) / GIB for phase in plan.phases]
        axes.barh(
            names, sizes, 0.62, left=left, label=part, color=COLORS[i % len(COLORS)], alpha=1 - 0.4 * (i // len(COLORS))
        )
        left = [low + size for low, size in zip(left, sizes, strict=True)]
    available = plan.available / GIB
    axes.set_xlim(0, 1.12 * max(available, *left))
    for i, (phase, total) in enumerate(zip(plan.phases, left, strict=True)):
        weight = "bold" if phase is plan.peak else "normal"
        axes.annotate(
            f"{total:.1f}", (total, i), (5, 0), textcoords="offset points", va="center", fontweight=weight,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    axes.axvline(available, color=TEXT, linestyle=(0, (4, 3)), linewidth=1.3)
    axes.annotate(
        f"{available:.1f} GiB may be used", (available, 1), (0, 4), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="right" if available > 0.5 * max(available, *left) else "left", va="bottom",
        fontsize=9.5,
    )  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel("GiB per GPU", color=QUIET)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=LINE)


def headline(plan: MemoryPlan) -> str:
    """Return a line that says whether the plan fits, with the memory of its largest phase."""
    peak, available = plan.peak.total / GIB, plan.available / GIB
    return f"{'It fits' if plan.fits else 'It does not fit'}: {peak:.1f} of {available:.1f} GiB"


def subtitle(plan: MemoryPlan) -> str:
    gpus = "1 GPU" if plan.num_ranks == 1 else f"{plan.num_ranks} GPUs"
    return f"{plan.card.name}, {plan.sharding.name}, {gpus}. The peak is in {plan.peak.name.replace('_', ' ')}."


def color_of(plan: MemoryPlan) -> str:
    return GOOD if plan.fits else BAD


def font() -> str:
    """Return the first font of the report that this machine has."""
    from matplotlib import font_manager

    known = set(font_manager.get_font_names())
    return next((name for name in FONTS if name in known), "sans-serif")
