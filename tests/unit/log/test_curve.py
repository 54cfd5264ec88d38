"""Reward curves over optimizer steps."""

from pathlib import Path

from PIL import Image

from rl_vlm.log.curve import Point, Series, draw_curve, reward_metrics, reward_series, thinned

LINES = [
    {"step": 0, "eval_reward": 0.25, "eval_rewards/match/mean": 0.5, "eval_rewards/match/ci_low": 0.25,
     "eval_rewards/match/ci_high": 0.75},
    {"step": 1, "reward": 0.5, "rewards/match/mean": 1.0},
    {"step": 2, "reward": float("nan"), "rewards/match/mean": None},
]  # fmt: skip


def test_a_reward_has_a_series_in_training_and_one_on_held_out_rows():
    assert reward_metrics(LINES) == [("Reward", "reward"), ("match", "rewards/match/mean")]
    assert reward_series(LINES, "rewards/match/mean") == [
        Series("training", [Point(1, 1.0)]),
        Series("held out", [Point(0, 0.5, 0.25, 0.75)], 1, "dots"),
    ]
    assert reward_series(LINES[1:], "reward") == [Series("training", [Point(1, 0.5)])]


def test_many_points_are_means_of_consecutive_ones():
    points = [Point(float(i), float(i), float(i), float(i + 2)) for i in range(480)]
    assert thinned(points)[:2] == [Point(0.5, 0.5, 0.5, 2.5), Point(2.5, 2.5, 2.5, 4.5)]


BLUE = (31, 119, 180)
"""The first colour of matplotlib's default cycle."""


def test_the_curve_has_a_panel_for_the_reward_and_one_for_scores_even_without_lines(tmp_path: Path):
    for lines, has_points in ((LINES, True), ([], False)):
        draw_curve(lines, tmp_path / "curve.png")
        with Image.open(tmp_path / "curve.png") as image:
            assert image.size == (960, 540)
            for left in (0, 480):
                panel = image.convert("RGB").crop((left, 0, left + 480, 540))
                assert (BLUE in {color for _, color in panel.getcolors(480 * 540) or []}) == has_points
