"""The clips of `examples/events`, read back from their mp4 files."""

from random import Random

import numpy as np

from examples.events.clips import draw_blinks, draw_order, draw_rows, order_held_out, order_reversed
from tests.unit.examples.motion.test_clips import frames_of

QUARTERS = {"northwest": (0, 0), "northeast": (0, 16), "southwest": (16, 0), "southeast": (16, 16)}
"""First line and column of each corner, of frames of 32 x 32 pixels."""


def corner_of(frame: np.ndarray) -> str:
    """The only quarter in which pixels are brighter than the background, which is 110."""
    (found,) = [name for name, (y, x) in QUARTERS.items() if frame[y : y + 16, x : x + 16].max() > 150]
    return found


def test_the_digit_is_gone_for_as_many_pairs_of_frames_as_the_solution_says():
    rows = draw_rows(60, "held-out", draw_blinks)
    for row in rows:
        frames = frames_of(row)
        assert frames.shape == (8, 32, 32)
        shown = frames.max((1, 2)) > 150
        assert (shown[::2] == shown[1::2]).all()
        assert ["never", "once", "twice", "thrice"].index(row["solution"]) == 4 - shown[::2].sum()
    assert len({row["solution"] for row in rows}) == 4


def test_the_corner_of_the_first_half_is_the_solution():
    for row in draw_rows(60, "held-out", draw_order):
        corners = [corner_of(frame) for frame in frames_of(row)]
        assert corners[:4] == [row["solution"]] * 4
        assert corners[4:] == [corners[4]] * 4 != corners[:4]


def test_reversed_clips_begin_with_the_other_corner():
    row, other = order_held_out()[0], order_reversed()[0]
    assert other["solution"] == row["solution"]
    assert corner_of(frames_of(other)[0]) == corner_of(frames_of(row)[7]) != row["solution"]


def test_held_out_scans_are_never_trained_on():
    def scans_of(name: str) -> set[bytes]:
        seen: set[bytes] = set()

        def note(random: Random, scans: list[np.ndarray]) -> dict[str, str]:
            seen.update(scan.tobytes() for scan in scans)
            return {}

        draw_rows(1, name, note)
        return seen

    assert len(scans_of("held-out")) > 400 and not scans_of("held-out") & scans_of("train")
