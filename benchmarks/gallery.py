"""Record runs that learn on a CPU, and draw the pictures and tables of docs/gallery.md from the records.

    python benchmarks/gallery.py digits exact_match runs/digits_0 runs/digits_1    # keep these runs, one per seed
    python benchmarks/gallery.py                                                   # draw the tables again

The records are in docs/gallery.json. A table stands between `<!-- TASK -->` and `<!-- end -->` of the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import ROOT, markdown_table
from benchmarks.report import fill
from rl_vlm.log.completions import held_out_paths
from rl_vlm.log.files import METRICS
from rl_vlm.log.metrics import MetricsLog

RECORDS = ROOT / "docs" / "gallery.json"
PAGE = ROOT / "docs" / "gallery.md"
IMAGES = ROOT / "docs" / "images"
NUM_IMAGES = 8


@dataclass(frozen=True)
class Curve:
    """The held-out scores of a run."""

    seed: int
    steps: list[int]
    scores: list[float]
    seconds: float
    """Time of training and evaluations, without the start."""
    verdict: str


def curve_of(folder: Path, function: str) -> Curve:
    """Read the held-out scores of a finished run by a reward function."""
    import yaml

    lines = MetricsLog(folder / METRICS).read()
    scores = {line["step"]: line[name] for line in lines if (name := f"eval_rewards/{function}/mean") in line}
    summary = json.loads((folder / "summary.json").read_text())
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    return Curve(
        seed=settings["train"]["seed"],
        steps=list(scores),
        scores=[round(score, 4) for score in scores.values()],
        seconds=round(summary["train_seconds"], 1),
        verdict=summary["verdict"]["outcome"],
    )


def curves_table(curves: Sequence[Curve]) -> str:
    """Return a row for each seed."""
    head = ["seed", "before", "after", "steps", "seconds", "verdict"]
    rows = [
        [
            str(curve.seed),
            f"{curve.scores[0]:.2f}",
            f"{curve.scores[-1]:.2f}",
            str(curve.steps[-1]),
            f"{curve.seconds:.0f}",
            curve.verdict,
        ]
        for curve in curves
    ]
    return markdown_table(head, rows)


def answers(folder: Path) -> list[dict[str, Any]]:
    """Return a few held-out rows with an image, and their `<answer>` before and after the run."""
    from pyarrow.parquet import read_table

    paths = held_out_paths(folder)
    first, last = (read_table(path).to_pylist() for path in (paths[0], paths[-1]))
    after = {row["sample_id"]: row for row in last}
    shown = [row for row in first if row["images"] and "<answer>" in row["completion"]]
    return [
        {
            "image": paths[0].parent / row["images"][0],
            "solution": row["data/solution"],
            "before": answer(row["completion"]),
            "after": answer(after[row["sample_id"]]["completion"]),
        }
        for row in shown[:NUM_IMAGES]
    ]


def answer(completion: str) -> str:
    return completion.removeprefix("<answer>").removesuffix("</answer>")


def draw_curves(axes: Any, curves: Sequence[Curve], function: str) -> None:
    """Draw the held-out scores of all seeds."""
    for curve in curves:
        axes.plot(curve.steps, curve.scores, marker="o", markersize=3, label=f"seed {curve.seed}")
    axes.set(xlabel="optimizer step", ylabel=f"{function}, held out", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw(rows: Sequence[dict[str, Any]], curves: Sequence[Curve], function: str, picture: Path) -> None:
    """Draw images with the answers before and after a run, if there are any, and the curves of all seeds."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(10 if rows else 6, 3.4), layout="constrained")
    if not rows:
        draw_curves(figure.subplots(), curves, function)
    else:
        parts: Any = figure.subfigures(1, 2, width_ratios=(1.1, 1))
        left, right = parts
        for axes, row in zip(left.subplots(2, NUM_IMAGES // 2).flat, rows, strict=True):
            axes.imshow(Image.open(row["image"]).convert("L"), cmap="gray")
            axes.set(xticks=[], yticks=[])
            colour = "tab:green" if row["after"] == row["solution"] else "tab:red"
            axes.set_title(f"{row['before']} → {row['after']}", fontsize=11, color=colour)
        draw_curves(right.subplots(), curves, function)
    figure.savefig(picture, dpi=110)


def records() -> dict[str, list[Curve]]:
    """Return the recorded runs by task."""
    return {task: [Curve(**one) for one in runs] for task, runs in json.loads(RECORDS.read_text()).items()}


def update_page(page: str) -> str:
    """Return the page with the tables of the records."""
    for task, curves in records().items():
        page = fill(page, task, curves_table(curves))
    return page


def main(arguments: Sequence[str]) -> None:
    if arguments:
        task, function, *folders = arguments
        curves = [curve_of(Path(folder), function) for folder in folders]
        kept = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
        RECORDS.write_text(json.dumps(kept | {task: list(map(asdict, curves))}, indent=1) + "\n")
        draw(answers(Path(folders[0])), curves, function, IMAGES / f"gallery_{task}.png")
    PAGE.write_text(update_page(PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
