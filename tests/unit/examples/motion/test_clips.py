"""The clips of `examples/motion`, read back from their mp4 files."""

import io
from collections.abc import Callable
from itertools import pairwise

import av
import numpy as np

from examples.motion.clips import backwards, draw_rows, shuffled, split, still


def frames_of(row: dict) -> np.ndarray:
    """Grey pixels (frames, height, width)."""
    with av.open(io.BytesIO(row["video"]), "r") as container:
        return np.stack([frame.to_ndarray(format="gray") for frame in container.decode(video=0)])


def shift_of(before: np.ndarray, after: np.ndarray) -> tuple[int, int]:
    """How far (down, right) pixels have to move, around the edges, to become the next frame's."""
    spectrum = np.fft.fft2(after.astype(float) - 110) * np.fft.fft2(before.astype(float) - 110).conj()
    down, right = np.unravel_index(np.fft.ifft2(spectrum).real.argmax(), before.shape)
    return (int(down) + 16) % 32 - 16, (int(right) + 16) % 32 - 16


STEPS = {"left": (0, -3), "right": (0, 3), "up": (-3, 0), "down": (3, 0)}
ROWS = draw_rows(40, "held-out")


def control(order: Callable[[int], list[int]]) -> list[dict]:
    return draw_rows(40, "held-out", order)


def test_digits_move_three_pixels_a_frame_in_the_direction_of_the_solution():
    for row in ROWS:
        frames = frames_of(row)
        assert frames.shape == (4, 32, 32)
        assert [shift_of(*pair) for pair in pairwise(frames)] == [STEPS[row["solution"]]] * 3
    assert {row["solution"] for row in ROWS} == set(STEPS)


def test_controls_have_the_frames_of_the_clips():
    for row, same, reverse, mixed in zip(ROWS, control(still), control(backwards), control(shuffled), strict=True):
        frames = frames_of(row).astype(int)
        assert {row["solution"]} == {other["solution"] for other in (same, reverse, mixed)}
        assert np.abs(frames_of(reverse)[::-1] - frames).max() < 40  # each is encoded with losses of its own
        assert np.abs(np.diff(frames_of(same).astype(int), axis=0)).max() < 40
        distances = np.abs(frames_of(mixed)[:, None].astype(int) - frames).max((2, 3))  # (place, frame)
        assert sorted(distances.argmin(1)) == [0, 1, 2, 3] and distances.min(1).max() < 40
    assert len({tuple(shuffled(number)) for number in range(200)}) == 24


def test_held_out_scans_are_others():
    held_out, trained = ({scan.tobytes() for scan in split(is_held_out)} for is_held_out in (True, False))
    assert len(held_out) > 400 and not held_out & trained
