"""What holds for every built-in reward function."""

import inspect
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pytest

from rewards.contract import Fault
from rewards.exact_match import exact_match
from rewards.registry import BUILT_INS

GOLD = {
    "choice": ("<answer>(B) a dog</answer>", "B"),
    "exact_match": ("<answer>a red car</answer>", "a red car"),
    "format_tags": ("<answer>7</answer>", None),
    "numeric": ("<answer>1,200.50</answer>", "1200.5"),
}
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


def columns(name: str, solutions: list) -> dict:
    return {"solution": solutions} if "solution" in inspect.signature(BUILT_INS[name]).parameters else {}


def test_every_built_in_has_a_gold_answer_here():
    assert sorted(GOLD) == sorted(BUILT_INS)


@pytest.mark.parametrize("name", BUILT_INS)
def test_the_gold_answer_scores_one(name):
    text, solution = GOLD[name]
    for completion in (text, [{"role": "assistant", "content": text}]):
        assert BUILT_INS[name]([completion], **columns(name, [solution])) == [1.0]


@pytest.mark.parametrize("name", BUILT_INS)
def test_no_answer_scores_zero(name):
    _, solution = GOLD[name]
    assert BUILT_INS[name](WRONG, **columns(name, [solution] * len(WRONG))) == [0.0] * len(WRONG)


@pytest.mark.parametrize("name", sorted(set(BUILT_INS) - {"format_tags"}))
def test_no_solution_means_does_not_apply(name):
    assert BUILT_INS[name]([GOLD[name][0]], solution=[None]) == [None]


@pytest.mark.parametrize("name", BUILT_INS)
def test_settings_are_keyword_only_with_defaults_and_everything_is_named(name):
    function = BUILT_INS[name]
    assert function.__name__ == name
    for parameter in list(inspect.signature(function).parameters.values()):
        is_setting = parameter.name not in ("completions", "solution")
        assert parameter.kind is (parameter.KEYWORD_ONLY if is_setting else parameter.POSITIONAL_OR_KEYWORD)
        assert is_setting == (parameter.default is not parameter.empty)


def test_the_package_imports_no_torch():
    program = (
        "import sys, rewards.registry, rewards.worker; sys.exit('torch' in sys.modules or 'rl_vlm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("solution", [["7"], {"answer": "7"}, b"7", ("7",), np.array(["7"]), object()])
@pytest.mark.parametrize("name", sorted(set(BUILT_INS) - {"format_tags"}))
def test_a_solution_that_nothing_can_equal_is_a_fault_of_its_completion(name, solution):
    text, gold = GOLD[name]
    first, second = BUILT_INS[name]([text, text], solution=[solution, gold])
    kind = type(solution).__name__
    assert first == Fault("type", f"`solution` is a {kind}; only text, a number or a bool can be compared")
    assert second == 1.0


@pytest.mark.parametrize("name", sorted(set(BUILT_INS) - {"format_tags"}))
def test_nan_is_no_solution(name):
    assert BUILT_INS[name]([GOLD[name][0]] * 2, solution=[float("nan"), np.float32("nan")]) == [None, None]


def test_numbers_and_bools_are_solutions():
    solutions = [7, np.int64(7), np.float32(0.5), True, np.bool_(True), Decimal("0.5")]
    texts = ["7", "7", "0.5", "True", "True", "0.5"]
    assert exact_match(texts, solutions) == [1.0] * 6
