"""COCO's mean average precision of the boxes of one image, as pycocotools computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from rewards.grounding.boxes import Region
from rewards.grounding.overlap import overlaps

if TYPE_CHECKING:
    import numpy as np

Confidence = Literal["equal", "given"]


def check_confidence(confidence: Any) -> None:
    """Raise ValueError if the setting `confidence` has an unknown value."""
    if confidence not in get_args(Confidence):
        raise ValueError(f"`confidence` is {confidence!r}; it must be one of {', '.join(get_args(Confidence))}")


def mean_average_precision(predicted: Sequence[Region], gold: Sequence[Region], confidence: Confidence) -> float:
    """Return the average precision at IoU .50:.05:.95, averaged over thresholds and the labels of the gold boxes.

    Labels count if a gold box has one. Boxes of equal confidence rank in the order of the answer. Without gold boxes,
    the result is 1.0 if no box is predicted, else 0.0.
    """
    import numpy as np

    if not gold:
        return float(not predicted)
    if confidence == "given":
        predicted = sorted(predicted, key=lambda region: -(region.confidence or 0.0))
    if all(box.label is None for box in gold):
        return _average_precision(overlaps(predicted, gold))
    by_label = [
        _average_precision(
            overlaps([p for p in predicted if p.label == label], [box for box in gold if box.label == label])
        )
        for label in dict.fromkeys(box.label for box in gold)
    ]
    return float(np.mean(by_label))


def _average_precision(ious: np.ndarray) -> float:
    """Average the precision over thresholds. Rows are predictions in order of confidence."""
    import numpy as np

    return float(np.mean([_interpolated(_are_correct(ious, t), ious.shape[1]) for t in np.linspace(0.5, 0.95, 10)]))


def _are_correct(ious: np.ndarray, threshold: float) -> np.ndarray:
    """Assign each prediction in turn the free gold box with the largest IoU, and return whether it gets one.

    The IoU must reach `threshold`. If IoUs are equal, the last one wins.
    """
    import numpy as np

    left, correct = ious.copy(), np.zeros(len(ious), dtype=bool)
    for i, row in enumerate(left):
        last_best = row.size - 1 - int(row[::-1].argmax())
        if row[last_best] >= min(threshold, 1 - 1e-10):
            correct[i] = True
            left[:, last_best] = -1
    return correct


def _interpolated(correct: np.ndarray, num_gold: int) -> float:
    """Average the precision over 101 recalls. At each recall, the largest precision at this recall or above counts."""
    import numpy as np

    found = correct.cumsum()
    precision = found / np.arange(1, len(correct) + 1)
    largest = np.maximum.accumulate(precision[::-1])[::-1]
    rank = np.searchsorted(found / num_gold, np.linspace(0, 1, 101), side="left")
    return float(np.append(largest, 0.0)[rank].mean())
