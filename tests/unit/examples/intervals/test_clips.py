"""The clips of `examples/intervals`, read back from their mp4 files."""

from examples.intervals.clips import draw_rows
from tests.unit.examples.motion.test_clips import frames_of


def seconds_with_digit(row: dict) -> list[int]:
    """The seconds in both of whose frames pixels are brighter than the background, which is 110."""
    frames = frames_of(row)
    assert frames.shape == (16, 32, 32)
    shown = frames.max((1, 2)) > 150
    assert (shown[::2] == shown[1::2]).all()
    return [second for second in range(8) if shown[2 * second]]


def test_the_digit_is_there_in_the_seconds_of_the_solution():
    rows = draw_rows(60, "held-out")
    for row in rows:
        start, end = map(int, row["solution"].split(" to "))
        assert seconds_with_digit(row) == [*range(start, end)]
    assert len({row["solution"] for row in rows}) == 7


def test_shuffled_clips_have_as_many_seconds_with_the_digit():
    rows = draw_rows(60, "held-out")
    shuffled = draw_rows(60, "held-out", shuffle=True)
    found = [(seconds_with_digit(row), seconds_with_digit(other)) for row, other in zip(rows, shuffled, strict=True)]
    assert all(len(seconds) == len(others) for seconds, others in found)
    assert sum(seconds == others for seconds, others in found) < 20
    assert [row["solution"] for row in rows] == [row["solution"] for row in shuffled]
