"""The scenes of `examples/grounding`: real-valued boxes around what is drawn, and no answer that fits them all."""

from itertools import product
from random import Random

import numpy as np
import pytest

from examples.grounding.scenes import COLOURS, NUM_HELD_OUT, PIXELS, draw_rows, draw_scene, held_out_rows, random_boxes


@pytest.mark.parametrize("shape", ["square", "circle", "triangle"])
def test_a_box_is_tight_around_its_shape(shape: str):
    pixels = np.asarray(draw_scene({f"red {shape}": (8.0, 16.0, 28.0, 36.0)})).astype(int)
    rows, columns = np.nonzero(pixels[..., 0] > 150)
    found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert found == pytest.approx([8, 16, 28, 36], abs=1)


def test_an_edge_within_a_pixel_shows():
    left = [np.asarray(draw_scene({"red square": (x, 10.0, 30.0, 30.0)}))[20, 10, 0] for x in (10.0, 10.5, 11.0)]
    assert left == [220, 170, 120]


def test_scenes_have_three_objects_apart_and_boxes_that_are_no_whole_pixels():
    rows = draw_rows(50, "test")
    assert len({row["object"] for row in rows}) == 9
    assert all(row["prompt"] == f"Where is the {row['object']}?" for row in rows)
    assert all(number % 1 > 0 for row in rows for number in row["solution"])
    for seed in range(50):
        boxes = random_boxes(Random(seed))
        assert len(boxes) == 3
        canvas = np.zeros((PIXELS * 8, PIXELS * 8), int)
        for x1, y1, x2, y2 in np.round(np.array(boxes) * 8).astype(int):
            assert 0 <= x1 < x2 <= PIXELS * 8 and 0 <= y1 < y2 <= PIXELS * 8
            canvas[y1:y2, x1:x2] += 1
        assert canvas.max() == 1


def test_each_scene_shows_every_colour_once():
    for row in draw_rows(20, "test"):
        pixels = np.asarray(row["image"]).reshape(-1, 3).tolist()
        assert all(list(colour) in pixels for colour in COLOURS.values())


def test_rows_are_the_same_in_every_run_and_held_out_scenes_are_others():
    assert held_out_rows()[3]["solution"] == held_out_rows()[3]["solution"]
    trained = {tuple(row["solution"]) for row in draw_rows(500, "train")}
    assert not trained & {tuple(row["solution"]) for row in held_out_rows()}


def test_no_constant_answer_has_a_mean_iou_above_a_fifth():
    """Every box on a grid of a sixteenth of the image's side, against the held-out boxes."""
    gold = np.array([row["solution"] for row in held_out_rows()]) / PIXELS
    assert gold.shape == (NUM_HELD_OUT, 4)
    grid = np.linspace(0, 1, 17)
    spans = [(start, end) for start, end in product(grid, grid) if start < end]
    starts, ends = np.array(spans).T
    shared = [
        np.clip(np.minimum(ends[:, None], gold[:, i + 2]) - np.maximum(starts[:, None], gold[:, i]), 0, None)
        for i in range(2)
    ]
    lengths, areas = ends - starts, np.prod(gold[:, 2:] - gold[:, :2], axis=1)
    best = max(
        (inside / (lengths[i] * lengths[:, None] + areas - inside)).mean(axis=1).max()
        for i in range(len(spans))
        if (inside := shared[0][i] * shared[1]) is not None
    )
    print(f"mean IoU of the best constant answer: {best:.3f}")
    assert 0.1 < best <= 0.2
