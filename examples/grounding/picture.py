"""Draw predicted and gold boxes of a few held-out scenes, with a row for each evaluated checkpoint.

rl-vlm eval configs/grounding.yaml --checkpoint runs/grounding/initial_model --checkpoint … --checkpoint …
python -m examples.grounding.picture runs/grounding/evaluation boxes.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from rewards.grounding.frames import Frames
from rl_vlm.reward.regions import Regions

NUM_SCENES = 6
REGIONS = Regions(Frames("per_mille", "original", 0))


def draw(evaluation: Path, picture: Path) -> None:
    """Draw the first scenes of every checkpoint in the folder `evaluation`, which `rl-vlm eval` wrote, to a PNG."""
    summaries = json.loads((evaluation / "comparison.json").read_text())
    figure = Figure(figsize=(1.7 * NUM_SCENES, 1.95 * len(summaries)), layout="constrained")
    grid = figure.subplots(len(summaries), NUM_SCENES, squeeze=False)
    for row_of_axes, (name, summary) in zip(grid, summaries.items(), strict=True):
        folder = evaluation / name
        rows = pyarrow.parquet.read_table(folder / "completions.parquet").slice(0, NUM_SCENES).to_pylist()
        for axes, row in zip(row_of_axes, rows, strict=True):
            draw_scene(axes, row, folder)
        row_of_axes[0].set_ylabel(f"{name}\nmean IoU {summary['rewards/iou/mean']:.2f}")
    figure.savefig(picture, dpi=110)


def draw_scene(axes: Axes, row: dict[str, Any], folder: Path) -> None:
    """Draw a row of the completions file: its scene, the gold box in white and the predicted one in black."""
    axes.imshow(Image.open(folder / row["images"][0]))
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"{row['data/object']}: {row['iou']:.2f}", fontsize=9)
    for colour, boxes in (("white", REGIONS.gold(row)), ("black", REGIONS.predicted(row))):
        for x1, y1, x2, y2 in (box.numbers for box in boxes if box.numbers):
            axes.add_patch(Rectangle((x1 - 0.5, y1 - 0.5), x2 - x1, y2 - y1, fill=False, edgecolor=colour, linewidth=2))


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
