import pytest

from rewards.answers.exact_match import exact_match


@pytest.mark.parametrize(
    ("text", "solution", "expected"),
    [
        ("<answer>7</answer>", "7", 1.0),
        ("<answer>7</answer>", "<answer>7</answer>", 1.0),
        ("<answer>7</answer>", 7, 1.0),
        ("7", "7", 1.0),
        ("<think>3? no</think><answer> a  red\ncar </answer>", "a red car", 1.0),
        ("<answer>7</answer> <answer>", "7", 1.0),
        ("<answer><answer>7</answer>", "7", 1.0),
        ("<answer>1</answer><answer>7</answer>", "1", 0.0),
        ("<answer>1 2 3 4 5 6 7 8 9</answer>", "7", 0.0),
        ("<answer>7 or 8</answer>", "7", 0.0),
        ("It is 7", "7", 0.0),
        ("<answer>7", "7", 0.0),
        ("</answer>7<answer>", "7", 0.0),
        ("<answer>７</answer>", "7", 0.0),
        ("<answer>٧</answer>", "7", 0.0),
        ("<answer>Red</answer>", "red", 0.0),
        ("", "7", 0.0),
        ("<answer></answer>", "7", 0.0),
        ("<answer></answer>", "", 0.0),
        ("", "", 0.0),
        ("7" * 1_000_000, "7", 0.0),
        ("<answer>" * 100_000 + "7", "7", 0.0),
        ("<answer>7</answer>", None, None),
    ],
)
def test_answers(text, solution, expected):
    assert exact_match([text], [solution]) == [expected]


def test_case_can_be_ignored():
    assert exact_match(["<answer>STRASSE</answer>", "red"], ["straße", "Blue"], ignore_case=True) == [1.0, 0.0]


def test_conversational_completions():
    assert exact_match([[{"role": "assistant", "content": "<answer>7</answer>"}]], ["7"]) == [1.0]
