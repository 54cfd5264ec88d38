"""Rows and rewards in which ranks have unlike work: images on one, text or groups without variance on the other."""

from typing import Any

from tests.helpers.builders import QUESTION, noise_image
from tests.helpers.videos import noise_video

ROWS = f"{__name__}:rows"
UNLIKE_ROWS = f"{__name__}:unlike_rows"
LONG_FIRST = f"{__name__}:long_rows_first"
VIDEO_ROWS = f"{__name__}:video_rows"
ONE_ROW = f"{__name__}:one_row"
REWARD = f"{__name__}:token_sum_or_constant"

IMAGES_BY_ROW = [
    [(16, 16)], [(32, 24)], [], [(24, 24), (16, 32)],  # mixed
    [(16, 24)], [(24, 16)], [], [],  # the second half is text
    [(24, 16)], [], [(16, 16)], [(32, 16)],  # the second half is constant in its rewards
    [(16, 16), (16, 16)], [], [(16, 24)], [],  # all constant but one
]  # fmt: skip
"""Image sizes of each row, four rows to an optimizer step."""
CONSTANT_ROWS = {10, 11, 13, 14, 15}


UNLIKE_IMAGES_BY_ROW = [
    [(16, 16)], [(32, 24)], [], [(24, 24), (16, 32)],  # mixed
    [(16, 24)], [(24, 16)], [], [],  # the second half is text
    [], [], [], [],  # no image
    [(24, 16)], [], [(16, 16)], [(32, 16)],  # all constant but the first, so that one rank has nothing to train
    [(16, 16)], [], [], [(16, 24)],  # all constant
    [], [], [(24, 24), (16, 16)], [(32, 32)],  # the first half is text
    [], [(32, 16)], [(16, 16), (16, 16)], [],  # the first half is constant
    [], [(16, 48)], [], [(16, 16), (16, 24), (24, 16)],  # mixed
]  # fmt: skip
"""Eight optimizer steps of the same kind."""
UNLIKE_CONSTANT_ROWS = {13, 14, 15, 16, 17, 18, 19, 24, 25}


def rows() -> list[dict[str, Any]]:
    return make_rows(IMAGES_BY_ROW, CONSTANT_ROWS)


def unlike_rows() -> list[dict[str, Any]]:
    return make_rows(UNLIKE_IMAGES_BY_ROW, UNLIKE_CONSTANT_ROWS)


def make_rows(images_by_row: list[list[tuple[int, int]]], constant_rows: set[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"row-{i}",
            "prompt": QUESTION + " Yes or no?" * (i % 3),
            "images": [noise_image(*size, seed=10 * i + k) for k, size in enumerate(sizes)],
            "constant": i in constant_rows,
        }
        for i, sizes in enumerate(images_by_row)
    ]


MEDIA_BY_ROW: list[tuple[list[tuple[int, int]], list[int]]] = [
    ([], [4]), ([], [5]), ([(16, 16)], []), ([(32, 24)], []),  # videos on one of two ranks, images on the other
    ([(16, 24)], [4]), ([], []), ([], []), ([], []),  # the second half is text
    ([], []), ([(24, 16)], []), ([], [6, 4]), ([(16, 16)], [4]),  # two videos, and both kinds
]  # fmt: skip
"""Image sizes, and numbers of frames of the videos, of each row, four rows to an optimizer step."""


def video_rows() -> list[dict[str, Any]]:
    """Rows with images, videos, both and neither. Frames have 16 x 16 pixels."""
    images = make_rows([sizes for sizes, _ in MEDIA_BY_ROW], set())
    return [
        row | {"videos": [noise_video(count, seed=10 * i + k, size=(16, 16)).frames for k, count in enumerate(counts)]}
        for i, (row, (_, counts)) in enumerate(zip(images, MEDIA_BY_ROW, strict=True))
    ]


def one_row() -> list[dict[str, Any]]:
    """A single row, so that only one of several ranks has something to sample in an evaluation."""
    return rows()[:1]


def long_rows_first() -> list[dict[str, Any]]:
    """Of every four rows the first two have long prompts; none is constant."""
    return [
        {
            "id": f"row-{i}",
            "prompt": QUESTION + " Yes or no?" * (40 - i if i % 4 < 2 else i % 3),
            "images": [noise_image(16, 16, seed=i)],
            "constant": False,
        }
        for i in range(8)
    ]


def token_sum_or_constant(completion_ids: list[list[int]], constant: list[bool], **_: Any) -> list[float | None]:
    """A reward that hardly any two completions share, but in constant rows; one completion in seven has none."""
    return [
        0.5 if is_constant else None if sum(ids) % 7 == 0 else sum(ids) % 97 / 97
        for ids, is_constant in zip(completion_ids, constant, strict=True)
    ]
