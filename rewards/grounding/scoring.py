"""Shared code of the grounding rewards. Each scores the predicted regions of a completion against gold boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rewards.contract import Fault, Score, plain
from rewards.grounding.boxes import LONGEST_GOLD_REPAIR, MOST_REGIONS, Region, read_object, read_text
from rewards.grounding.frames import Frames, scaled
from rewards.text import TextOrMessages, answer_text, completion_text

Sizes = Sequence[Sequence[tuple[int, int]]]
"""Width and height of a row's images, per completion."""
Compare = Callable[[list[Region], list[Region]], float]
"""Scores predicted regions against gold boxes, both in the frame of the gold boxes."""


def score_rows(
    rows: tuple[Sequence[TextOrMessages], Sequence[Any], Sizes, Sizes],
    frames: Frames,
    compare: Compare,
    one_box: bool = False,
) -> list[Score]:
    """Score each completion against its `solution`. An answer without a readable region scores 0.0.

    `rows` are completions, solutions, image sizes, and the model's image sizes. `one_box` requires one gold box.
    """
    return [
        _score(completion_text(completion), solution, frames, sizes, compare, one_box)
        for completion, solution, *sizes in zip(*rows, strict=True)
    ]


def _score(text: str, solution: Any, frames: Frames, sizes: Sequence[Any], compare: Compare, one_box: bool) -> Score:
    gold = gold_boxes(solution)
    if not isinstance(gold, list):
        return gold
    if one_box and len(gold) != 1:
        return Fault("type", f"`solution` has {len(gold)} boxes; this function compares one box")
    row = frames.of_row(*sizes)
    factors = row.factors()
    if isinstance(factors, Fault):
        return factors
    if misplaced := row.misplaced(gold):
        return misplaced
    predicted = read_text(answer_text(text))
    return 0.0 if predicted is None else compare(scaled(predicted, factors), gold)


def gold_boxes(solution: Any) -> list[Region] | Fault | None:
    """Return the boxes of a gold answer. Return None if there is no gold answer, or a fault if a box is unreadable.

    A gold answer is text in any form of completions, or a list, mapping or array. NaN means no gold answer.
    """
    gold = plain(solution)
    if gold is None or (isinstance(gold, float) and gold != gold):
        return None
    if isinstance(gold, bool | int | float | bytes):
        return Fault("type", f"`solution` is a {type(gold).__name__}; a box is x1, y1, x2, y2, as text or a list")
    regions = read_text(answer_text(gold), LONGEST_GOLD_REPAIR) if isinstance(gold, str) else read_object(gold)
    if regions is None:
        return Fault("type", f"`solution` has no box that can be read, or more than {MOST_REGIONS}: {_shown(gold)}")
    if not all(region.is_box for region in regions):
        return Fault("type", f"`solution` has a box that is not x1 < x2, y1 < y2, all finite: {_shown(gold)}")
    return regions


def _shown(gold: Any) -> str:
    text = " ".join(repr(gold).split())
    return text if len(text) <= 80 else text[:80] + "…"
