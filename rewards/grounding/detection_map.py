"""Reward for the labelled boxes of an image: COCO's mean average precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.grounding.average_precision import Confidence, check_confidence, mean_average_precision
from rewards.grounding.boxes import Region
from rewards.grounding.frames import Coordinates, Frames
from rewards.grounding.scoring import Sizes, score_rows
from rewards.text import TextOrMessages


def detection_map(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    image_sizes: Sizes,
    model_image_sizes: Sizes,
    *,
    coordinates: Coordinates = "absolute",
    solution_coordinates: Coordinates = "original",
    image_index: int = 0,
    confidence: Confidence = "equal",
) -> list[Score]:
    """Return COCO's mAP at IoU .50:.95 of the predicted boxes of one image."""
    frames = Frames(coordinates, solution_coordinates, image_index)
    check_confidence(confidence)

    def compare(predicted: list[Region], gold: list[Region]) -> float:
        return mean_average_precision(predicted, gold, confidence)

    return score_rows((completions, solution, image_sizes, model_image_sizes), frames, compare)
