import time

import numpy as np
import pytest

from rewards.answers.choice import choice, named_option
from rewards.contract import Fault


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
        "<answer>A</answer><answer>A or B</answer>", "<answer>B", "Ｂ", "В", "ß",
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
    started = time.process_time()
    assert choice([text], ["B"]) == [0.0]
    assert time.process_time() - started < 2.0


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
