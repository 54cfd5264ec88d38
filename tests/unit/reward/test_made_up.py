"""The made-up completion that a reward function is tried on."""

from typing import Any

import pytest

from rl_vlm.reward.made_up import made_up_completion


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({}, "7"),
        ({"solution": None, "answer": "8"}, "8"),
        ({"solution": "9", "reward_model": {"style": "rule", "ground_truth": "8"}}, "8"),
        ({"solution": 9}, "9"),
    ],
)
def test_it_gives_the_gold_answer_of_the_first_column_that_has_one(columns: dict[str, Any], answer: str):
    assert made_up_completion(columns) == f"<think>This completion is made up.</think>\n<answer>{answer}</answer>"
