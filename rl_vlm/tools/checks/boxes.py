"""Find gold boxes that are inverted or leave their image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rl_vlm.data.images import image_size
from rl_vlm.data.samples import Rows
from rl_vlm.errors import DataError, Finding
from rl_vlm.reward.golds import Box, gold_boxes
from rl_vlm.tools.checks.rows import about_row

FEW = 0.1
"""A column holds boxes if at least this share of the rows has lists of four numbers in it."""
USUAL = 0.5
"""A frame of coordinates fits a column if at least this share of the rows with boxes has no wrong box in it."""
FRAMES = ("relative", "image", "per mille")
SLACK = 0.01
"""Share of a side by which a box may leave its image, since data sets round."""
KIND = "box outside the image or inverted"
REMEDY = "Correct the box, or leave the row out: no completion can overlap with a box that is not there."
OTHER_FRAME = (
    "Boxes are [x1, y1, x2, y2] with x1 < x2 and y1 < y2. If these have other numbers, such as width and height, "
    "convert them, unless the reward function does."
)


def box_findings(rows: Rows, used: Sequence[int], columns: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each row whose gold box is inverted or outside its image. `columns` hold gold answers.

    Try relative, image and per mille coordinates, and take the first frame that fits the column. If none fits, yield
    one finding about the column.
    """
    for column in columns:
        found = list(boxes_of(rows, used, column))
        if len(found) < FEW * len(used):
            continue
        most = (1 - USUAL) * len(found)
        by_frame = [badly_placed(found, frame) for frame in FRAMES]
        bad = next((bad for bad in by_frame if len(bad) <= most), None)
        if bad is None:
            row, what = by_frame[FRAMES.index("image")][0]
            text = f"{rows.name}: most of the {len(found)} rows with boxes in column {column}; row {row}: {what}"
            yield Finding("warning", KIND, text, OTHER_FRAME, rows.name)
        for row, what in bad or ():
            yield about_row(rows, row, KIND, f", column {column}: {what}", REMEDY)


Placed = tuple[int, list[Box], tuple[int, int]]
"""A row, its boxes, and the (width, height) of its image."""


def boxes_of(rows: Rows, used: Sequence[int], column: str) -> Iterator[Placed]:
    """Yield the rows that have one image, and boxes in the column."""
    for row in used:
        parsed = rows.parse(row)
        boxes = gold_boxes(parsed.columns.get(column))
        if not boxes or len(parsed.images) != 1:
            continue
        try:
            yield row, boxes, image_size(parsed.images[0][1], rows.part(row).image_folder, rows.place(row))
        except DataError:
            continue  # the check of the rows reports it


def badly_placed(found: Sequence[Placed], frame: str) -> list[tuple[int, str]]:
    """Return the rows with a box that is inverted or leaves its image in this frame, each with a message."""
    bad = []
    for row, boxes, size in found:
        width, height = {"relative": (1, 1), "image": size, "per mille": (1000, 1000)}[frame]
        for box in boxes:
            x1, y1, x2, y2 = box
            shown = f"[{', '.join(f'{number:g}' for number in box)}]"
            if x2 <= x1 or y2 <= y1:
                bad.append((row, f"the box {shown} is inverted: x1 < x2 and y1 < y2 do not hold"))
            elif min(x1 / width, y1 / height) < -SLACK or max(x2 / width, y2 / height) > 1 + SLACK:
                bad.append((row, f"the box {shown} leaves its image, which is {width} wide and {height} high"))
            else:
                continue
            break
    return bad
