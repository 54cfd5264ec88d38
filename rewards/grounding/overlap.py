"""Overlap of boxes, and the best assignment of predicted to gold ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rewards.grounding.boxes import Region

if TYPE_CHECKING:
    import numpy as np


def overlaps(predicted: Sequence[Region], gold: Sequence[Region]) -> np.ndarray:
    """Return the IoU of each predicted region (rows) with each gold box. It is 0 if the region is not a box."""
    import numpy as np

    nowhere = (0.0, 0.0, 0.0, 0.0)
    boxes = np.array([region.numbers if region.is_box else nowhere for region in predicted]).reshape(-1, 1, 4)
    others = np.array([region.numbers for region in gold]).reshape(1, -1, 4)
    sides = np.minimum(boxes[..., 2:], others[..., 2:]) - np.maximum(boxes[..., :2], others[..., :2])
    shared = sides.clip(min=0).prod(axis=-1)
    areas, other_areas = ((b[..., 2:] - b[..., :2]).prod(axis=-1) for b in (boxes, others))
    return shared / (areas + other_areas - shared)


def labels_agree(predicted: Sequence[Region], gold: Sequence[Region], require_labels: bool) -> np.ndarray:
    """Return whether the label of each predicted region (rows) agrees with each gold box's label.

    Equal labels agree. A missing label agrees with any label, unless `require_labels` is set and the gold box has one.
    """
    import numpy as np

    def agree(mine: str | None, theirs: str | None) -> bool:
        return theirs is None or mine == theirs or (mine is None and not require_labels)

    pairs = [[agree(region.label, box.label) for box in gold] for region in predicted]
    return np.array(pairs, dtype=bool).reshape(len(predicted), len(gold))


def best_sum(values: np.ndarray) -> float:
    """Return the largest sum of values with at most one value per row and column (Hungarian algorithm)."""
    from scipy.optimize import linear_sum_assignment

    return float(values[linear_sum_assignment(values, maximize=True)].sum())


def f1(values: np.ndarray) -> float:
    """Return 2 S / (rows + columns), where S is the best sum of values. It is 1.0 without rows and columns."""
    return 2 * best_sum(values) / sum(values.shape) if sum(values.shape) else 1.0
