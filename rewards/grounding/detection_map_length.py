"""Reward for the labelled boxes of an image, reduced if there are more of them than gold boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.grounding.average_precision import Confidence, check_confidence, mean_average_precision
from rewards.grounding.boxes import Region
from rewards.grounding.frames import Coordinates, Frames
from rewards.grounding.scoring import Sizes, score_rows
from rewards.text import TextOrMessages


def detection_map_length(
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
    """Return COCO's mAP times min(1, gold boxes / predicted boxes) (`odLength` of VLM-R1, arXiv:2504.07615)."""
    frames = Frames(coordinates, solution_coordinates, image_index)
    check_confidence(confidence)

    def compare(predicted: list[Region], gold: list[Region]) -> float:
        share = min(1.0, len(gold) / len(predicted)) if predicted else 1.0
        return share * mean_average_precision(predicted, gold, confidence)

    return score_rows((completions, solution, image_sizes, model_image_sizes), frames, compare)
