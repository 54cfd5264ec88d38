"""The functions that compare texts, against other packages and on hostile inputs."""

import random
import unicodedata

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from rewards.contract import Fault
from rewards.overlap.character_error_rate import character_error_rate
from rewards.overlap.edit_similarity import edit_similarity
from rewards.overlap.rouge_l import rouge_l, words
from rewards.text import composed
from tests.helpers.cpu_time import stays_within

FUNCTIONS = [edit_similarity, character_error_rate, rouge_l]


def random_text(random: random.Random, alphabet: str, longest: int) -> str:
    return "".join(random.choices(alphabet, k=random.randint(1, longest)))


def edit_distance(first: str, second: str) -> int:
    """The Levenshtein distance by the textbook's table (Wagner and Fischer 1974)."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        row, above = [i], row
        for j, b in enumerate(second, 1):
            row.append(min(row[-1] + 1, above[j] + 1, above[j - 1] + (a != b)))
    return row[-1]


def test_rouge_l_agrees_with_rouge_score_on_ascii():
    rng = random.Random(0)
    printable = "".join(map(chr, range(32, 127)))
    vocabulary = ["a", "the", "dog", "Dogs", "running", "don't", "x1", "2", "B.", "-", "_"]
    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    num = 0
    while num < 1000:
        if num % 2:
            gold, answer = (random_text(rng, printable + "  ab\n\t", 60) for _ in range(2))
        else:
            gold, answer = (" ".join(rng.choices(vocabulary, k=rng.randint(1, 15))) for _ in range(2))
        if "answer>" in gold + answer or not words(gold):
            continue
        expected = scorer.score(gold, answer)["rougeL"].fmeasure
        assert rouge_l([answer], [gold]) == [pytest.approx(expected, abs=1e-12)], (answer, gold)
        num += 1


def test_edit_distances_agree_with_the_textbook():
    rng = random.Random(0)
    for _ in range(300):
        gold, answer = (random_text(rng, "abc é猫", 12).strip() for _ in range(2))
        if not gold or not answer:
            continue
        distance = edit_distance(answer, gold)
        similarity = 1 - distance / max(len(answer), len(gold))
        kept = {"normalize_whitespace": False}
        assert edit_similarity([answer], [gold], **kept) == [
            pytest.approx(similarity if len(answer) <= 10 * len(gold) else 0.0)
        ]
        assert character_error_rate([answer], [gold], **kept) == [pytest.approx(max(0.0, 1 - distance / len(gold)))]


def test_the_bound_on_lengths_lowers_a_score_by_less_than_a_tenth():
    assert edit_similarity(["x" * 9 + "a"], ["a"]) == [pytest.approx(0.1)]
    assert edit_similarity(["x" * 10 + "a"], ["a"]) == [0.0]
    assert rouge_l(["x " * 19 + "a"], ["a"]) == [pytest.approx(2 / 21)]
    assert rouge_l(["x " * 20 + "a"], ["a"]) == [0.0]
    assert character_error_rate(["a" + "x" * 9], ["a" * 5]) == [0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop_it, x1!", ["don", "t", "stop", "it", "x1"]),
        ("Straße ÜBER", ["straße", "über"]),
        ("三只猫 two", ["三", "只", "猫", "two"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("кошка, собака", ["кошка", "собака"]),
        ("ภาษา", ["ภ", "า", "ษ", "า"]),
        ("한국어 단어", ["한국어", "단어"]),
        ("cafe\u0301 café", ["café", "café"]),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


def test_composed_and_decomposed_characters_are_equal():
    for function in FUNCTIONS:
        assert function(["cafe\u0301"], ["café"]) == [1.0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_best_of_several_references_counts(function):
    assert function(["a b"], [["x", None, "a b", ""]]) == [1.0]
    assert function(["a b"], [np.array(["x", "a b"])]) == [1.0]
    assert function(["7"], [7]) == [1.0]
    assert function(["a b"] * 4, [[], ["", " "], [None], float("nan")]) == [None] * 4


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("solution", [{"a": 1}, b"a", [["a"]], ["a", {}], object()])
def test_a_solution_that_is_no_text_is_a_fault_of_its_completion(function, solution):
    first, second = function(["a", "a"], [solution, "a"])
    assert isinstance(first, Fault) and first.kind == "type"
    assert second == 1.0


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "junk",
    ["a" * 100_000, "ab " * 33_000, "\x00" * 100_000, "\ud800", "٣" * 1000, "e" + "\u0301" * 100_000, "猫" * 100_000],
)
def test_junk_scores_little_in_little_time(function, junk):
    (score,) = function([junk], ["0123456789"])
    assert score == pytest.approx(0.0, abs=0.1)
    long_gold = "a gold text of some words " * 400
    (score,) = function([junk], [long_gold])
    assert score == pytest.approx(0.0, abs=0.3)
    assert stays_within(2.0, lambda: function([junk, junk], ["0123456789", long_gold]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_many_combining_marks_take_no_long_time(function):
    completion = "a" + "\u0301\u0316" * 50_000
    assert stays_within(1.0, lambda: function([completion], ["a dog"]))


def test_a_character_keeps_thirty_marks():
    assert composed("é" + "\u0316" * 40) == unicodedata.normalize("NFC", "e" + "\u0301" + "\u0316" * 30)
    assert composed("e\u0301x") == "éx"
