"""Reward for points that lie in the gold boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.grounding.boxes import Region
from rewards.grounding.frames import Coordinates, Frames
from rewards.grounding.overlap import f1, labels_agree
from rewards.grounding.scoring import Sizes, score_rows
from rewards.text import TextOrMessages


def point_in_box(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    image_sizes: Sizes,
    model_image_sizes: Sizes,
    *,
    coordinates: Coordinates = "absolute",
    solution_coordinates: Coordinates = "original",
    image_index: int = 0,
    require_labels: bool = False,
) -> list[Score]:
    """Return the F1 score of predicted points, each assigned to at most one gold box that it lies in.

    A predicted box counts as a point that lies nowhere.
    """
    frames = Frames(coordinates, solution_coordinates, image_index)

    def compare(predicted: list[Region], gold: list[Region]) -> float:
        hits = [[_lies_in(region, box) for box in gold] for region in predicted]
        agreed = labels_agree(predicted, gold, require_labels)
        return f1(agreed.astype(float) * (hits or agreed))

    return score_rows((completions, solution, image_sizes, model_image_sizes), frames, compare)


def _lies_in(point: Region, box: Region) -> bool:
    if point.numbers is None or len(point.numbers) != 2 or box.numbers is None:
        return False
    (x, y), (x1, y1, x2, y2) = point.numbers, box.numbers
    return x1 <= x <= x2 and y1 <= y <= y2
