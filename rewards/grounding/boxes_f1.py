"""Reward for several boxes: F1 score of the best assignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.grounding.boxes import Region
from rewards.grounding.frames import Coordinates, Frames
from rewards.grounding.overlap import f1, labels_agree, overlaps
from rewards.grounding.scoring import Sizes, score_rows
from rewards.text import TextOrMessages


def boxes_f1(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    image_sizes: Sizes,
    model_image_sizes: Sizes,
    *,
    coordinates: Coordinates = "absolute",
    solution_coordinates: Coordinates = "original",
    image_index: int = 0,
    threshold: float | None = 0.5,
    require_labels: bool = False,
) -> list[Score]:
    """Return the F1 score of predicted boxes, each assigned to at most one gold box.

    A pair counts 1 if its IoU is `threshold` or more. If `threshold` is None, a pair counts as much as its IoU.
    """
    frames = Frames(coordinates, solution_coordinates, image_index)
    check_threshold(threshold)

    def compare(predicted: list[Region], gold: list[Region]) -> float:
        ious = overlaps(predicted, gold)
        values = ious if threshold is None else (ious >= threshold).astype(float)
        return f1(values * labels_agree(predicted, gold, require_labels))

    return score_rows((completions, solution, image_sizes, model_image_sizes), frames, compare)


def check_threshold(threshold: Any) -> None:
    """Raise TypeError or ValueError unless an IoU threshold is None or a number in (0, 1]."""
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
        raise TypeError(f"`threshold` is {threshold!r}; it must be a number or null")
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"`threshold` is {threshold}; an IoU is above 0 and at most 1")
