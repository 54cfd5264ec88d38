"""What functions return, as it is read."""

import math

import numpy as np
import pytest
import torch

from rewards.contract import Answer, Fault, join, read_returned


def kinds(answer: Answer) -> list[str | float | None]:
    """Scores, with the kind in place of a fault."""
    return [score.kind if isinstance(score, Fault) else score for score in answer.scores]


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5, None],
        (True, 0.5, None),
        [np.float32(1), np.float64(0.5), None],
        [torch.tensor(1), torch.tensor(0.5), None],
        [np.array(1.0), torch.tensor(0.5, dtype=torch.bfloat16), None],
        {"reward": [1, 0.5, None]},
        {"iou": [1, 0.5, None]},
    ],
)
def test_accepted(returned):
    answer = read_returned(returned, 3)
    assert answer.scores == [1.0, 0.5, None]
    assert [type(score) for score in answer.scores] == [float, float, type(None)]
    assert answer.sub_scores == {}


@pytest.mark.parametrize("returned", [np.array([1.0, 2.0]), torch.tensor([1, 2]), torch.tensor([True, 2])])
def test_arrays_are_lists(returned):
    assert read_returned(returned, 2).scores == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "inf"),
        (1e300, "magnitude"),
        (-1_000_001, "magnitude"),
        (10**400, "magnitude"),
        (np.float32(3e38), "magnitude"),
        (torch.tensor(math.nan), "nan"),
        ("1.0", "type"),
        ([1.0], "type"),
        (torch.tensor([1.0]), "type"),
        (1j, "type"),
    ],
)
def test_a_bad_element_faults_its_completion_only(value, kind):
    assert kinds(read_returned([0.25, value, None], 3)) == [0.25, kind, None]


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, "none"),
        ([], "length"),
        ([1.0], "length"),
        ([1.0, 2.0, 3.0], "length"),
        (1.0, "type"),
        (np.float64(1.0), "type"),
        ("10", "type"),
        (iter([1.0, 2.0]), "type"),
        ({}, "type"),
        ({"iou": [1.0, 2.0], "area": [1.0, 2.0]}, "type"),
        ({"reward": 1.0}, "type"),
        ({"reward": [1.0, 2.0], "iou": [1.0]}, "length"),
    ],
)
def test_a_bad_whole_faults_every_completion(returned, kind):
    assert kinds(read_returned(returned, 2)) == [kind, kind]


def test_the_largest_reward_is_allowed():
    assert read_returned([1e6, -1e6], 2).scores == [1e6, -1e6]


def test_other_keys_are_sub_scores():
    answer = read_returned({"reward": [1, 2], "iou": [np.float32(0.5), "none"]}, 2)
    assert answer.scores == [1.0, 2.0]
    assert answer.sub_scores == {"iou": [0.5, "none"]}


def test_messages_say_what_came_back():
    (fault,) = read_returned(["one"], 1).scores
    assert fault == Fault("type", "returned 'one' (str), not a number")
    (fault,) = read_returned({"a": [1], "b": [1]}, 1).scores
    assert fault == Fault("type", "returned a dict with keys ['a', 'b'], none of them `reward`")


def test_join_fills_columns_that_a_call_did_not_log():
    first = Answer([1.0, None], sub_scores={"iou": [0.5, 0.6]}, metrics={"m": [1.0]})
    second = Answer([2.0], extras={"seen": ["x"]}, metrics={"m": [3.0]})
    assert join([first, second]) == Answer(
        [1.0, None, 2.0], {"iou": [0.5, 0.6, None]}, {"seen": [None, None, "x"]}, {"m": [1.0, 3.0]}
    )


def test_a_function_may_return_a_fault_itself():
    fault = Fault("type", "`solution` is a list")
    assert read_returned([1.0, fault, None], 3).scores == [1.0, fault, None]


class Unreadable:
    """Raises whenever it is looked at."""

    ndim = 0

    def item(self):
        raise RuntimeError("no")

    __repr__ = item


def test_an_element_that_cannot_be_read_is_a_fault_of_its_completion_alone():
    assert read_returned([1.0, Unreadable()], 2).scores == [
        1.0, Fault("type", "returned a Unreadable that cannot be read: RuntimeError"),
    ]  # fmt: skip


def test_a_fault_is_described_on_one_line():
    (fault,) = read_returned([np.zeros((2, 2))], 1).scores
    assert fault == Fault("type", "returned array([[0., 0.], [0., 0.]]) (ndarray), not a number")
