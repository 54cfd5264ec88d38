from typing import Any

import numpy as np
import pytest

from rewards.answers.choice import choice, named_option
from rewards.contract import Fault
from tests.helpers.cpu_time import stays_within


@pytest.mark.parametrize(
    "text",
    [
        "B", "b", "(B)", "(b)", "[B]", "**B**", "**(B)**", "`B`", "B.", "B)", "(B).", " B\n",
        "B) a dog", "B. a dog", "B. A dog", "b. a dog", "B: a dog", "(B) a dog", "**B.** a dog", "(B) vitamin C",
        "B because dogs bark", "B, because dogs bark",
        "The answer is B", "The answer is (B).", "the correct answer is: **B**", "Answer: B", "Answer:\nB. a dog",
        "The correct option is B", "The answer is option B", "My choice: b)",
        "The answer is B because dogs bark.",
        "Option A is a cat, so the answer is B.",
        "The answer is not A. The answer is B.",
        "The answer is B. Once more, the answer is B",
        "Option B", "B is correct", "B is the right answer", "B - dog", "B\nA dog",
        "Final Answer\nB", "**Final Answer**\n\nB",
        "I choose B", "Looking at it, I'd pick (B).", "The answer should be B", "The answer is clearly (B).",
        "（B）", "Ｂ", "B。", "B、狗", "B：狗", "【B】", "答案：B", "答案是B。", "选B", "我选择B", "选项：B", "选项B",
        "B because I see a dog", "B. I think so", "B, because A dog barks",
        "B because option A is a cat", "B: e.g. a dog",
        "B because it is not C",
        "<answer>B</answer>", "<think>A? No.</think> <answer>(B) a dog</answer>", "<answer>The answer is B</answer>",
    ],
)  # fmt: skip
def test_names_option_b(text):
    assert named_option(text, "ABCDEFGHIJ") == "B"


@pytest.mark.parametrize(
    "text",
    [
        "", "<answer></answer>", "I don't know", "I do not know", "The answer is I don't know", "none", "not B",
        "The answer is not B", "A dog", "A cat and a dog", "The answer is a dog", "be", "Bee", "B-side", "K", "Z.",
        "A B C D", "ABCD", "A, B, C, D", "A/B", "A or B", "A and B", "(A) (B)", "(A)(B)(C)(D)", "[A] [B]",
        "A. cat B. dog", "A. cat\nB. dog\nC. cow\nD. pig", "A) B) C) D)", "(B) or (C)", "B. C", "(b) C)", "B. (c)",
        "The answer is A or B", "The answer is A. The answer is B.", "The answer is (A) and (B)",
        "<answer>A</answer><answer>A or B</answer>", "<answer>B", "В", "ß",
        "(B) or C", "B. or C", "B. C, D or A", "(B), C, D, A", "(B) C D", "B.C.D", "B because A because C", "B - C",
        "B\nC", "B、C、D", "（B）（C）", "(b) or c", "(b) c d", "B is correct, C is correct", "Option B or option C",
        "B and maybe C", "Option A: cat. Option B: dog.", "I choose B. I choose C.", "A. The answer is not A",
        "It shows a dog",
    ],
)  # fmt: skip
def test_names_no_single_option(text):
    assert named_option(text, "ABCDEFGHIJ") is None


def test_the_last_answer_tag_counts():
    assert named_option("<answer>A</answer><answer>B</answer>", "AB") == "B"


def test_scores():
    completions = ["(B)", "C", "I don't know", "B", "B", "B"]
    solutions = ["B", "B", "B", "<answer>(b)</answer>", None, "a dog"]
    assert choice(completions, solutions) == [1.0, 0.0, 0.0, 1.0, None, None]


def test_letters_can_be_restricted():
    assert choice(["E", "D", "E) x"], ["E", "D", "D"], letters="ABCD") == [None, 1.0, 0.0]


def test_conversational_completions():
    assert choice([[{"role": "assistant", "content": "The answer is (B)"}]], ["B"]) == [1.0]


@pytest.mark.parametrize("text", ["answer is " * 30_000, "(A" * 100_000, "answer" + " " * 300_000, "A. " * 100_000])
def test_long_outputs_take_no_time(text):
    assert choice([text], ["B"]) == [0.0]
    assert stays_within(2.0, lambda: choice([text], ["B"]))


@pytest.mark.parametrize(
    "text",
    [
        *("(B) " + "or " * 100_000, "B. " + "- " * 150_000, "B" + "\n" * 300_000, "I choose " * 30_000, "选" * 100_000),
        *("B. " + "A because " * 30_000, "B. " + "a dog " * 50_000, "answer should " * 30_000),
    ],
)
def test_long_lists_take_no_time(text):
    assert stays_within(2.0, lambda: choice([text], ["B"], options=[["a cat", "a dog"]]))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("(B) a cat", 0.0), ("B. A cat.", 0.0), ("B: a cat or a dog", 0.0), ("B. a dog or a cat", 0.0),
        ("B. a dog", 1.0), ("(B) a dog, not a cat", 1.0), ("B. a dog because a cat is smaller", 1.0),
        ("B or a cat", 0.0), ("(B) a catfish", 1.0), ("B. dog", 1.0),
    ],
)  # fmt: skip
def test_the_text_of_another_option_contradicts_a_letter(text, score):
    assert choice([text], ["B"], options=[["a cat", "a dog"]]) == [score]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("B. -5", ["5", "-5"]), ("B. 3.5", ["3", "3.5 m"]), ("(B) red and blue", ["red", "Red and blue"]),
        ("B. C. elegans", ["E. coli", "C. elegans"]), ("B. (1, 2)", ["1", "(1, 2)"]), ("(B) a dog", ["cat", "a dog"]),
    ],
)  # fmt: skip
def test_an_options_own_text_contradicts_no_letter(text, options):
    assert choice([text], ["B"], options=[options]) == [1.0]


def test_a_number_beside_options_needs_the_setting():
    options = ["2", "4", "1"]
    for gold in (0, 1, 7, np.int64(1)):
        (score,) = choice(["B"], [gold], options=[options])
        assert isinstance(score, Fault) and score.kind == "type" and "`solution_is`" in score.message
    assert choice(["B", "4", "A"], [1, np.int64(1), 1], options=[options] * 3, solution_is="index") == [1.0, 1.0, 0.0]
    assert choice(["B", "C"], [1, 1], solution_is="index") == [1.0, 0.0]
    assert choice(["B", "B"], [None, float("nan")], options=[options] * 2, solution_is="index") == [None, None]
    assert choice(["B", "B"], ["4", "B"], options=[options] * 2) == [1.0, 1.0]


@pytest.mark.parametrize("gold", [-1, 3, 99, "B", "1", True, 1.5, [1], np.array([1, 1])])
def test_what_is_no_place_of_an_option_is_a_fault(gold):
    (score,) = choice(["B"], [gold], options=[["a", "b", "c"]], solution_is="index")
    assert isinstance(score, Fault) and score.kind == "type"


def test_an_unknown_meaning_of_solutions_is_refused():
    with pytest.raises(ValueError, match="neither 'answer' nor 'index'"):
        choice(["B"], ["B"], solution_is=BAD)


BAD: Any = "number"
OPTIONS = ["a cat", "A dog.", "C. elegans", "B"]


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("a dog", "B", 1.0), ("B", "a dog", 1.0), ("(b) a dog", "A dog", 1.0), ("The answer is a dog.", "B", 1.0),
        ("**A  dog**", "B", 1.0), ("C. elegans", "C", 1.0), ("C", "C. elegans", 1.0), ("D", "D", 1.0), ("B", "D", 0.0),
        ("a cat, a dog", "B", 0.0), ("a fish", "B", 0.0), ("dog", "B", 0.0), ("E", "B", 0.0), ("", "B", 0.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [OPTIONS, dict(zip("ABCD", OPTIONS, strict=True)), np.array(OPTIONS)])
def test_the_text_of_an_option_names_it(text, gold, score, options):
    assert choice([text], [gold], options=[options]) == [score]
    assert choice([text], [gold], choices=[options], options=[None]) == [score]


def test_rows_without_options_are_read_as_before():
    assert choice(["B", "a dog"], ["B", "B"], options=[None, None]) == [1.0, 0.0]


def test_letters_without_text_are_left_out():
    first, second = choice(["y", "C"], ["B", "C"], options=[{"A": "x", "b": "y", "C": None}] * 2)
    assert first == 1.0
    assert isinstance(second, Fault)


@pytest.mark.parametrize("options", ["xy", 7, {"1": "x"}, ["x"] * 11])
def test_options_of_another_form_are_a_fault(options):
    (score,) = choice(["B"], ["B"], options=[options])
    assert isinstance(score, Fault) and score.kind == "type"
