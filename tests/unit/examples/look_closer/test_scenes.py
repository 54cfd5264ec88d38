"""The scenes of `examples/look_closer`: one digit in a cell, which a tool shows in the pixels of the picture."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from examples.look_closer.scenes import CELLS, Picture, cropped, draw_rows, place, seen_and_read, split

ROWS = draw_rows(40, "test")


def picture_of(row: dict) -> Image.Image:
    return Image.open(BytesIO(row["image"]))


def test_cells_have_the_names_of_a_chessboard_from_above():
    assert len(CELLS) == 16
    assert [place(cell) for cell in ("a1", "d1", "a2", "b3", "d4")] == [
        (0, 0), (384, 0), (0, 128), (128, 256), (384, 384),
    ]  # fmt: skip


def test_a_digit_is_in_the_middle_of_its_cell_and_nowhere_else():
    for row in ROWS:
        pixels = np.asarray(picture_of(row))
        assert pixels.shape == (512, 512)
        rows, columns = np.nonzero(pixels >= 160)  # noise ends at 149
        x, y = place(row["cell"])
        assert x + 32 <= columns.min() and columns.max() < x + 96
        assert y + 32 <= rows.min() and rows.max() < y + 96
        assert max(np.ptp(columns), np.ptp(rows)) < 50


def test_the_model_sees_at_most_three_pixels_of_a_side_of_a_digit():
    """16 x 16 pixels of 512 x 512 have 32 pixels of the picture as a side, so 50 are 1.6, and touch 3 at most."""
    assert 1.5 < 50 / (512 / 16) < 2


def test_crop_shows_the_middle_of_a_cell_and_pays_for_the_digit():
    row = ROWS[0]
    picture, other = picture_of(row).convert("RGB"), next(cell for cell in CELLS if cell != row["cell"])
    environment = Picture()
    environment.reset(image=picture, **{name: row[name] for name in ("cell", "prompt", "solution")})
    (block,) = environment.crop(other)
    assert block["image"].size == (64, 64)
    assert np.asarray(block["image"]).max() < 160
    assert environment.get_reward() == 0
    (block,) = environment.crop(row["cell"])
    assert np.asarray(block["image"]).max() > 200
    assert environment.get_reward() == 0.2
    environment.reset(image=picture, cell=row["cell"])
    assert environment.get_reward() == 0
    with pytest.raises(ValueError, match="there is no cell e1"):
        environment.crop("e1")


def test_a_crop_has_the_pixels_of_the_picture():
    picture = Image.fromarray(np.arange(512 * 512, dtype=np.int32).reshape(512, 512))
    pixels = np.asarray(cropped(picture, "b3"))
    assert (pixels[0, 0], pixels[63, 63]) == (288 * 512 + 160, 351 * 512 + 223)


def test_held_out_scans_are_others_and_rows_are_the_same_in_every_run():
    held_out, trained = ({scan.tobytes() for scan, _ in split(is_held_out)} for is_held_out in (True, False))
    assert (len(split(True)), len(split(False))) == (450, 1347)
    assert not held_out & trained
    assert draw_rows(2, "test") == ROWS[:2]


def test_only_an_answer_after_the_digit_has_been_seen_is_rewarded():
    def turns(*cells: str) -> list[dict]:
        return [{"calls": [{"name": "crop", "arguments": {"cell": cell}}]} for cell in cells] + [{"calls": []}]

    right, wrong = "<answer>7</answer>", "<answer>1</answer>"
    cases = [
        (right, turns("b3")),
        (right, turns("a1", "b3")),
        (right, turns("a1")),
        (right, turns()),
        (wrong, turns("b3")),
    ]
    rewards = seen_and_read([answer for answer, _ in cases], [some for _, some in cases], ["b3"] * 5, ["7"] * 5)
    assert rewards == [1, 1, 0, 0, 0]
