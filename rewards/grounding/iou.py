"""Reward for one box: intersection over union."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.grounding.boxes import Region
from rewards.grounding.frames import Coordinates, Frames
from rewards.grounding.overlap import overlaps
from rewards.grounding.scoring import Sizes, score_rows
from rewards.text import TextOrMessages


def iou(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    image_sizes: Sizes,
    model_image_sizes: Sizes,
    *,
    coordinates: Coordinates = "absolute",
    solution_coordinates: Coordinates = "original",
    image_index: int = 0,
) -> list[Score]:
    """Return the IoU of the predicted box and the gold box; 0.0 unless exactly one box is predicted."""
    frames = Frames(coordinates, solution_coordinates, image_index)
    return score_rows((completions, solution, image_sizes, model_image_sizes), frames, _iou, one_box=True)


def _iou(predicted: list[Region], gold: list[Region]) -> float:
    return float(overlaps(predicted, gold)[0, 0]) if len(predicted) == 1 else 0.0
