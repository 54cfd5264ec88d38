"""The reward functions of videos, beyond the tables of docs/built_in_rewards.md."""

import math
from typing import Any, cast

import pytest

from rewards.contract import Fault
from rewards.temporal.intervals import read_intervals, read_moment
from rewards.temporal.order import order
from rewards.temporal.temporal_iou import temporal_iou
from rewards.temporal.temporal_recall import temporal_recall
from rewards.temporal.time_distance import time_distance
from tests.helpers.cpu_time import stays_within


@pytest.mark.parametrize(
    "text, intervals",
    [
        ("3.2 to 7.5", [(3.2, 7.5)]), ("3.2-7.5", [(3.2, 7.5)]), ("3s – 7s", [(3, 7)]), ("between 3 and 7", [(3, 7)]),
        ("from 3 seconds until 7 seconds", [(3, 7)]), ("00:03-01:07", [(3, 67)]),
        ("1:00:00 to 1:00:02.5", [(3600, 3602.5)]),
        ("[3.2, 7.5]", [(3.2, 7.5)]), ('{"start": 3, "end": "0:07"}', [(3, 7)]),
        ('[{"start": 1, "end": 2}, {"start": 3, "end": 4}]', [(1, 2), (3, 4)]), ("1 to 2; 3 to 4", [(1, 2), (3, 4)]),
        ("<think>9 to 10</think>It is <answer>1 to 2</answer>.", [(1, 2)]),
        ("7 to 3", []), ("3 to 3", []), ("3", []), ("3 to 7, or 9", []), ("[3, 7, 9]", []), ("[]", []), ("", []),
        ("[NaN, 7]", []), ("[-1, 7]", []), ("[true, 7]", []), ("-1 to 7", []), ("1 to 2\n" * 101, []),
    ],
)  # fmt: skip
def test_intervals_in_a_text(text: str, intervals: list[tuple[float, float]]):
    assert read_intervals(text) == intervals


@pytest.mark.parametrize(
    "text, moment", [("12.5", 12.5), ("at 1:02 s", 62), ("12.5 seconds", 12.5), ("3 4", None), ("½", None), ("", None)]
)
def test_the_moment_in_a_text(text: str, moment: float | None):
    assert read_moment(text) == moment


def test_each_interval_is_in_one_pair():
    assert temporal_iou(["0 to 4, 0 to 4"], [[[0, 4], [10, 14]]]) == [0.5]
    assert temporal_iou(["0 to 3, 2 to 4"], [[[0, 4], [2, 3]]]) == [pytest.approx((3 / 4 + 1 / 2) / 2)]
    assert temporal_recall(["0 to 4, 0 to 4"], [[[0, 4], [10, 14]]]) == [0.5]


@pytest.mark.parametrize("gold", ["soon", [7, 3], [3, 3], {"start": 3}, [[1, 2], [4, 3]], 7, True, b"1 to 2"])
def test_a_gold_interval_that_cannot_be_met_is_a_fault(gold: Any):
    for function in (temporal_iou, temporal_recall):
        (score,) = function(["1 to 2"], [gold])
        assert isinstance(score, Fault) and score.kind == "type"


def test_a_missing_gold_answer_does_not_apply():
    for function in (temporal_iou, temporal_recall, time_distance, order):
        assert function(["1 to 2"] * 2, [None, float("nan")]) == [None, None]


@pytest.mark.parametrize("gold", [10 / 3, 7.199999999999999, 0.1 + 0.2, 0.00012345678901234567, 1e-7, 12, 0])
def test_gold_times_may_be_any_number(gold: float):
    shown = f"{gold:.17f}"
    assert time_distance([shown], [gold]) == [pytest.approx(1.0, abs=1e-12)]
    assert temporal_iou([f"{shown} to 99"], [[gold, 99]]) == [pytest.approx(1.0, abs=1e-12)]


@pytest.mark.parametrize("gold", [10 / 3, 7.199999999999999, 0.1 + 0.2, 0.00012345678901234567])
def test_gold_times_may_be_in_texts_as_python_prints_them(gold: float):
    assert time_distance([f"{gold}", f"{gold} s"], [f"{gold}"] * 2) == [1.0, 1.0]
    for function in (temporal_iou, temporal_recall):
        assert function([f"{gold} to 9.0"], [f"{gold} to 9.0"]) == [1.0]
        assert function([f"[{gold}, 9.0]"], [f"<answer>00:0{gold} to 0:09</answer>"]) == [1.0]


@pytest.mark.parametrize("gold", [-1.0, math.inf, True, 1e9, "1e-7", "-1", [1]])
def test_a_gold_time_that_is_no_time_is_a_fault(gold: Any):
    (score,) = time_distance(["1"], [gold])
    assert isinstance(score, Fault) and "no time" in score.message


TIMES = [[[0.5, 2.5, 4.5, 6.5], [0.0, 1.0]]]
"""Of the frames of two videos of a row."""


@pytest.mark.parametrize(
    "gold, seconds",
    [([1, 2], "2.5 to 4.5"), ([0, 4], "0.5 to 8.5"), ("0.5 to 1", "1.5 to 2.5"), ([3, 4], "6.5 to 8.5")],
)
def test_gold_intervals_in_numbers_of_frames(gold: Any, seconds: str):
    for function in (temporal_iou, temporal_recall):
        assert function([seconds], [gold], TIMES, solution_times="frames") == [1.0]
        assert function([seconds], [gold], TIMES) != [1.0]
    assert time_distance(["4.5"], [2], TIMES, solution_times="frames") == [1.0]


def test_numbers_that_no_frame_has_are_faults():
    for function, gold in ((temporal_iou, [1, 5]), (temporal_recall, [1, 5]), (time_distance, 5)):
        (score,) = function(["1 to 2"], [gold], TIMES, solution_times="frames")
        assert isinstance(score, Fault) and "and the first video has 4 frames" in score.message
        (score,) = function(["1 to 2"], [gold], [[]], solution_times="frames")
        assert isinstance(score, Fault) and "has 0 frames" in score.message
        with pytest.raises(ValueError, match="solution_times is 'frame', expected seconds or frames"):
            function([], [], solution_times=cast(Any, "frame"))


def test_distance_falls_with_the_scale():
    assert time_distance(["3"], [5], scale=4) == [math.exp(-0.5)]
    for scale in (0, -1, math.inf):
        with pytest.raises(ValueError, match="expected a number above 0"):
            time_distance([], [], scale=scale)
    with pytest.raises(ValueError, match="at most 1"):
        temporal_recall([], [], threshold=0)


def test_order_counts_pairs():
    assert order(["a\nb\nd\nc"], ["a, b, c, d"]) == [pytest.approx(4 / 6)]
    assert order(['["A", "C", "B"]'], [["a", "b", "c"]]) == [pytest.approx(1 / 3)]
    assert order(["b a"], ["a b"]) == [0.0]


@pytest.mark.parametrize("unit", ["1", "1 to ", "[", "1:", ", ", " ", "1 s "])
def test_long_answers_take_little_time(unit: str):
    golds: list[Any] = [(temporal_iou, [1, 2]), (temporal_recall, [1, 2]), (time_distance, 1), (order, "a, b")]
    assert [function([unit * 50_000], [gold]) for function, gold in golds] == [[0.0]] * 4
    assert stays_within(2.0, lambda: [function([unit * 50_000], [gold]) for function, gold in golds])
