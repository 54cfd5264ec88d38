"""Held-out scenes whose images or questions are those of other scenes, so that they do not say where the object is."""

from typing import Any

from examples.grounding.scenes import held_out_rows


def shuffled_images() -> list[dict[str, Any]]:
    """Return the held-out rows, each with the image of the next one."""
    return moved("image")


def shuffled_questions() -> list[dict[str, Any]]:
    """Return the held-out rows, each with the question of the next one."""
    return moved("prompt")


def moved(column: str) -> list[dict[str, Any]]:
    """Return the held-out rows with the values of one column moved by one row."""
    rows = held_out_rows()
    return [{**row, column: other[column]} for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]
