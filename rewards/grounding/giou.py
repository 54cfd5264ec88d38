"""Reward for one box that also grows as a box without overlap comes nearer: generalized IoU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.grounding.boxes import Region
from rewards.grounding.frames import Coordinates, Frames
from rewards.grounding.scoring import Sizes, score_rows
from rewards.text import TextOrMessages


def giou(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    image_sizes: Sizes,
    model_image_sizes: Sizes,
    *,
    coordinates: Coordinates = "absolute",
    solution_coordinates: Coordinates = "original",
    image_index: int = 0,
) -> list[Score]:
    """Return (1 + GIoU) / 2 of the predicted and the gold box (Rezatofighi et al. 2019, arXiv:1902.09630, Alg. 1).

    It is 0.0 unless exactly one box is predicted.
    """
    frames = Frames(coordinates, solution_coordinates, image_index)
    return score_rows((completions, solution, image_sizes, model_image_sizes), frames, _giou, one_box=True)


def _giou(predicted: list[Region], gold: list[Region]) -> float:
    if len(predicted) != 1 or not predicted[0].is_box:
        return 0.0
    return (1 + generalized_iou(predicted[0].numbers or (), gold[0].numbers or ())) / 2


def generalized_iou(box: Sequence[float], other: Sequence[float]) -> float:
    """Return IoU - (hull - union) / hull of two boxes, in (-1, 1]."""
    width = max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
    height = max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
    union = _area(box) + _area(other) - width * height
    hull = (max(box[2], other[2]) - min(box[0], other[0])) * (max(box[3], other[3]) - min(box[1], other[1]))
    return width * height / union - (hull - union) / hull


def _area(box: Sequence[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
