"""Clips of a handwritten digit that moves, as mp4 files.

`configs/motion.yaml` names `train_rows` and `held_out_rows`. The other rows are those of controls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO
from random import Random
from typing import Any

SIDE = 32
"""Width and height of a frame in pixels."""
DIGIT = 8
"""Width and height of a digit."""
GREY = 110
"""Brightness of the background."""
NUM_TRAINING, NUM_HELD_OUT = 2048, 512

WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Direction along x, to the right, and along y, downwards."""
QUESTION = "Which way does the digit move?"
SPEED = 3
"""Pixels from a frame to the next."""
NUM_FRAMES, FPS = 4, 4
"""Frames of a clip in which a digit moves, and frames per second."""


def forwards(number: int) -> list[int]:
    """Return the order of a clip's frames."""
    return [*range(NUM_FRAMES)]


def backwards(number: int) -> list[int]:
    """Return the order from the last to the first frame."""
    return [*range(NUM_FRAMES)][::-1]


def still(number: int) -> list[int]:
    """Return one frame for all places, by the number of the row."""
    return [number % NUM_FRAMES] * NUM_FRAMES


def shuffled(number: int) -> list[int]:
    """Return a random order, the same in every run for the number of a row."""
    return Random(number).sample(range(NUM_FRAMES), NUM_FRAMES)


def train_rows() -> list[dict[str, Any]]:
    """Return the rows to train on."""
    return draw_rows(NUM_TRAINING, "train")


def held_out_rows() -> list[dict[str, Any]]:
    """Return rows with scans that are never trained on."""
    return draw_rows(NUM_HELD_OUT, "held-out")


def still_rows() -> list[dict[str, Any]]:
    """Return the held-out rows with one of their frames in all places."""
    return draw_rows(NUM_HELD_OUT, "held-out", still)


def reversed_rows() -> list[dict[str, Any]]:
    """Return the held-out rows with frames from the last to the first."""
    return draw_rows(NUM_HELD_OUT, "held-out", backwards)


def shuffled_rows() -> list[dict[str, Any]]:
    """Return the held-out rows with frames in a random order."""
    return draw_rows(NUM_HELD_OUT, "held-out", shuffled)


def draw_rows(num_rows: int, name: str, order: Callable[[int], list[int]] = forwards) -> list[dict[str, Any]]:
    """Return rows of one clip each, the same in every run; `name` seeds the random numbers and begins the ids.

    Rows of the name "held-out" have other scans than all other rows. `order` says for the number of a row which frames
    are shown.
    """
    random, scans = Random(name), split(name == "held-out")
    return [{"id": f"{name}-{i:04d}", **draw_row(random, random.choice(scans), order(i))} for i in range(num_rows)]


def split(held_out: bool) -> list[Any]:
    """Return a quarter of the scans, which is held out, or the others."""
    return [scan for i, scan in enumerate(load_scans()) if (i % 4 == 0) == held_out]


@cache
def load_scans() -> Any:
    """Return scikit-learn's 1,797 scans, as arrays of 8 x 8 pixels from 0 to 255."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return (digits.images * (255 / 16)).astype("uint8")


def draw_row(random: Random, scan: Any, order: list[int]) -> dict[str, Any]:
    """Draw a digit that starts anywhere and moves, and show its frames in an order.

    It leaves at an edge and comes in at the other, so that a single frame says nothing of the way.
    """
    way = random.choice([*WAYS])
    x, y = random.randrange(SIDE), random.randrange(SIDE)
    dx, dy = WAYS[way]
    frames = [frame(scan, x + i * SPEED * dx, y + i * SPEED * dy) for i in order]
    return {"prompt": QUESTION, "video": mp4(frames, FPS), "solution": way}


def frame(scan: Any, x: int, y: int) -> Any:
    """Return grey pixels (height, width) with a digit. What is beyond an edge is at the other one."""
    import numpy as np

    canvas = np.full((SIDE, SIDE), GREY, "uint8")
    canvas[:DIGIT, :DIGIT] = GREY + scan * ((255 - GREY) / 255)
    return np.roll(canvas, (y, x), (0, 1))


def mp4(frames: Sequence[Any], fps: int) -> bytes:
    """Return frames of grey pixels as a file."""
    import av
    import numpy as np

    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=fps, options={"crf": "10"})
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        stream.codec_context.thread_count = 1  # frames this small are not worth starting threads
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.stack([pixels] * 3, 2), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
