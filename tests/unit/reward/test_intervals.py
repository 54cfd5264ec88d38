import pytest

from rl_vlm.reward.intervals import Intervals


def reader(*functions: str) -> Intervals:
    found = Intervals.of_rewards([{"function": name} for name in functions])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("solution", "expected"),
    [("[3.5, 7]", [(3.5, 7.0)]), ("0:03 to 1:07", [(3.0, 67.0)]), ("[[1, 2], [4, 6]]", [(1.0, 2.0), (4.0, 6.0)]),
     (None, []), ("[7, 3]", []), ("a dog", [])],
)  # fmt: skip
def test_gold_intervals_in_a_completions_file(solution: str | None, expected: list[tuple[float, float]]):
    assert reader("temporal_iou").gold({"data/solution": solution}) == expected


def test_predicted_intervals_are_those_that_the_reward_reads():
    intervals = reader("format", "temporal_recall")
    assert intervals.predicted({"completion": "At 9 s. <answer>3.2 to 7.5</answer>"}) == [(3.2, 7.5)]
    assert intervals.predicted({"completion": "<answer>7.5 to 3.2</answer>"}) == []


def test_a_moment_has_no_length():
    moments = reader("time_distance")
    row = {"completion": "<answer>4.5 s</answer>", "data/solution": 5}
    assert (moments.predicted(row), moments.gold(row)) == ([(4.5, 4.5)], [(5.0, 5.0)])
    assert moments.predicted({"completion": "never"}) == []


def test_gold_intervals_in_numbers_of_frames():
    found = Intervals.of_rewards([{"function": "temporal_iou", "kwargs": {"solution_times": "frames"}}])
    assert found is not None
    assert found.gold({"data/solution": "[1, 3]", "video_frame_times": [[0.0, 2.5, 5.0, 7.5]]}) == [(2.5, 7.5)]


def test_other_functions_read_no_intervals():
    assert Intervals.of_rewards(["iou", {"function": "mine.py:temporal_iou"}]) is None
