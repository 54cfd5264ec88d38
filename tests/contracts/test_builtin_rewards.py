"""What holds for every built-in reward function."""

import inspect
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pytest

from rewards.answers.exact_match import exact_match
from rewards.contract import Fault
from rewards.registry import BUILT_INS
from tests.helpers.reward_tables import PAGE, WITHOUT_TABLE, stated_scores

GOLD = {stated.function: stated for stated in reversed(list(stated_scores(PAGE.read_text())))}
"""The first row of each function's table in docs/built_in_rewards.md, whose score is its maximum."""
NEEDS_SOLUTION = sorted(
    name for name, f in BUILT_INS.items() if "solution" in inspect.signature(f).parameters and name not in WITHOUT_TABLE
)
GRADED = ["character_error_rate", "edit_similarity", "rouge_l"]
"""Functions that give a wrong answer what is right in it."""
SIGNED = ["cosine_length"]
"""Functions that score a wrong answer below 0."""
TEXT_SOLUTION = ["choice", "counting", "exact_match", "maths", "numeric", "yes_no"]
"""Functions whose solution is text, a number or a bool."""
COLUMNS = (
    "choices", "completion_ids", "image_sizes", "images", "model_image_sizes", "options", "prompts",
    "video_frame_times",
)  # fmt: skip
"""Other arguments of a call that a built-in reads: columns of rows, or what every call offers."""
OPTIONAL = [
    ("choice", "choices"), ("choice", "options"), ("judge", "solution"), ("temporal_iou", "video_frame_times"),
    ("temporal_recall", "video_frame_times"), ("time_distance", "video_frame_times"),
]  # fmt: skip
"""Columns that a function can do without."""
WRONG = [
    "",
    " ",
    "<answer></answer>",
    "<answer>I don't know</answer> and more",
    "7 8",
    "A B C D",
    "\x00",
    "<" * 100_000,
]


def columns_and_settings(name: str, count: int) -> dict:
    """The columns of the gold answer for `count` completions, and its settings."""
    known = inspect.signature(BUILT_INS[name]).parameters
    stated = GOLD[name].arguments.items()
    left_out = {key: [None] * count for key in COLUMNS if key in known}
    return left_out | {
        key: value if known[key].kind is known[key].KEYWORD_ONLY else [value] * count for key, value in stated
    }


@pytest.mark.parametrize("name", sorted({*NEEDS_SOLUTION} - {*GRADED, *SIGNED}))
def test_no_answer_scores_zero(name):
    assert BUILT_INS[name](WRONG, **columns_and_settings(name, len(WRONG))) == [0.0] * len(WRONG)


@pytest.mark.parametrize("name", GRADED)
def test_no_answer_scores_little_where_answers_are_right_in_part(name):
    scores = BUILT_INS[name](WRONG, **columns_and_settings(name, len(WRONG)))
    assert scores[:3] == [0.0] * 3
    assert all(0 <= score < 0.3 for score in scores)


@pytest.mark.parametrize("name", SIGNED)
def test_no_answer_scores_less_than_zero(name):
    assert all(score < 0 for score in BUILT_INS[name](WRONG, **columns_and_settings(name, len(WRONG))))


@pytest.mark.parametrize("name", NEEDS_SOLUTION)
def test_no_solution_means_does_not_apply(name):
    arguments = columns_and_settings(name, 1) | {"solution": [None]}
    assert BUILT_INS[name]([GOLD[name].completion], **arguments) == [None]


@pytest.mark.parametrize("name", BUILT_INS)
def test_settings_are_keyword_only_with_defaults_and_everything_is_named(name):
    function = BUILT_INS[name]
    assert function.__name__ == name
    for parameter in list(inspect.signature(function).parameters.values()):
        is_setting = parameter.name not in ("completions", "solution", *COLUMNS)
        assert parameter.kind is (parameter.KEYWORD_ONLY if is_setting else parameter.POSITIONAL_OR_KEYWORD)
        has_default = is_setting or (name, parameter.name) in OPTIONAL
        assert has_default == (parameter.default is not parameter.empty)


def test_the_package_imports_no_torch():
    program = (
        "import sys, rewards.registry, rewards.worker; sys.exit('torch' in sys.modules or 'rl_vlm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("solution", [["7"], {"answer": "7"}, b"7", ("7",), np.array(["7"]), object()])
@pytest.mark.parametrize("name", TEXT_SOLUTION)
def test_a_solution_that_nothing_can_equal_is_a_fault_of_its_completion(name, solution):
    text, gold = GOLD[name].completion, GOLD[name].arguments["solution"]
    first, second = BUILT_INS[name]([text, text], solution=[solution, gold])
    assert isinstance(first, Fault)
    assert first.kind == "type" and first.message.startswith(f"`solution` is a {type(solution).__name__};")
    assert second == 1.0


@pytest.mark.parametrize("name", TEXT_SOLUTION)
def test_nan_is_no_solution(name):
    assert BUILT_INS[name]([GOLD[name].completion] * 2, solution=[float("nan"), np.float32("nan")]) == [None, None]


def test_numbers_and_bools_are_solutions():
    solutions = [7, np.int64(7), np.float32(0.5), True, np.bool_(True), Decimal("0.5")]
    texts = ["7", "7", "0.5", "True", "True", "0.5"]
    assert exact_match(texts, solutions) == [1.0] * 6
