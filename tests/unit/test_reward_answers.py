"""The reward functions maths, counting, yes_no and short_answer, beyond the tables of docs/rewards.md."""

import random
import string
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rewards.answers.counting import counting
from rewards.answers.maths import maths
from rewards.answers.short_answer import short_answer
from rewards.answers.yes_no import yes_no
from rewards.contract import Fault
from rewards.registry import BUILT_INS, TIMEOUTS
from rewards.worker import Worker

RNG = random.Random(0)
LONG = [
    *("7" * 100_000, "7 " * 50_000, "." * 100_000, "-" * 100_000, "yes" * 30_000, "yes and " * 12_000),
    *("<answer>" * 12_000, "\\boxed{" * 14_000, "\\boxed{" * 10_000 + "8" + "}" * 10_000, "{" * 100_000),
    *(
        "\\" * 100_000,
        "$" * 100_001,
        "\\boxed" + " " * 100_000,
        "^" * 900,
        "9^" * 450,
        "! " * 450,
        "(" * 900,
        "[" * 900,
    ),
]
ODD = ["\x00", "\ud800", "٧", "７", "²", "Ⅶ", "\u202e8", "nan", "inf", "-inf", "1e999", "None", "null", "{}", "⑦"]


@pytest.mark.parametrize("text", [*LONG, *ODD], ids=lambda text: ascii(text[:12]))
@pytest.mark.parametrize("function", [counting, yes_no, short_answer, maths, partial(counting, partial=True)])
def test_long_and_odd_answers_score_zero_in_bounded_time(function: Callable[..., Any], text: str) -> None:
    started = time.process_time()
    assert function([text], ["no" if function is yes_no else 1]) == [0.0]
    assert time.process_time() - started < 4.0


def latex_pairs() -> list[tuple[str, str]]:
    """Pairs of a gold answer and an answer, each in a LaTeX environment, half of them equal."""
    forms = [r"${0}$", r"\boxed{{{0}}}", r"It is \({0}\)", r"So \boxed{{{0}}}", r"\[{0}\]"]
    pairs = []
    for _ in range(200):
        a, b, other = RNG.randint(-9, 9), RNG.randint(2, 9), RNG.randint(-9, 9)
        same = [
            (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{2 * a}}}{{{2 * b}}}"),
            (f"(x+{b})^2", f"x^2+{2 * b}x+{b * b}"),
            (f"{a}", f"{a}.0"),
            (rf"\sqrt{{{b * b * 2}}}", rf"{b}\sqrt{{2}}"),
            (rf"\{{{a}, {b + 10}\}}", rf"\{{{b + 10}, {a}\}}"),
            (f"({a}, {b})", f"({a}, {b})"),
            (f"x > {a}", rf"({a}, \infty)"),
            (rf"\begin{{pmatrix}}{a}&{b}\\1&2\end{{pmatrix}}", rf"\begin{{pmatrix}}{a}&{b}\\1&2\end{{pmatrix}}"),
            (f"{a}", f"x = {a}"),
            (rf"2^{{{b}}}", f"{2**b}"),
        ]
        gold, answer = RNG.choice(same)
        answer = RNG.choice([answer, answer, str(other), rf"\frac{{{other}}}{{7}}"])
        pairs.append((RNG.choice(forms).format(gold), RNG.choice(forms).format(answer)))
    return pairs


def test_maths_agrees_with_math_verify():
    from math_verify import parse, verify

    pairs = latex_pairs()
    scores = maths([answer for _, answer in pairs], [gold for gold, _ in pairs])
    assert scores == [float(verify(parse(gold), parse(answer))) for gold, answer in pairs]
    assert 50 < scores.count(1.0) < 150


@pytest.mark.parametrize("text", ["1/2", "2*3", "-7", "1,234.5", "50%", "(1 + 2) / 4", "0.25"])
def test_maths_reads_plain_expressions_as_math_verify_does(text):
    from math_verify import parse, verify

    values = ["1/2", "6", "-7", "1234.5", "0.5", "3/4", "1/4"]
    assert maths([text] * len(values), values) == [float(verify(parse(value), parse(text))) for value in values]
    assert 1.0 in maths([text] * len(values), values)


@pytest.mark.parametrize("text", ["x + 1", "1, 2", "sqrt(2)", "2pi"])
def test_maths_reads_the_whole_of_a_plain_expression(text):
    assert maths([text] * 2, ["1", "2"]) == [0.0, 0.0]


SLOW = [r"$\binom{99999999}{5000000}$", "(x+y+z)^{500}", r"9^{9\cdot 9^9}", r"\frac{1}{" * 60 + "2" + "}" * 60]


@pytest.mark.parametrize("text", SLOW)
def test_maths_stops_after_two_seconds(text):
    maths(["7"], ["7"])
    started = time.perf_counter()
    assert maths([text], ["7"]) == [0.0]
    assert time.perf_counter() - started < 4.0


@pytest.mark.parametrize("gold", ["9^9^9", "99999999!", "2^{100000}", "7" * 2000, "", r"\frac{"])
def test_a_gold_answer_that_is_too_large_or_unreadable_is_a_fault(gold):
    (score,) = maths(["7"], [gold])
    assert isinstance(score, Fault) and score.kind == "type"


def test_maths_works_outside_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(maths(["1/2", "8"], ["0.5", "7"])))
    thread.start()
    thread.join()
    assert scores == [1.0, 0.0]


def load_maths():
    return maths


def test_maths_in_a_worker():
    worker = Worker(load_maths, TIMEOUTS["maths"])
    answers = worker.call([({"completions": [SLOW[1], "1/2"], "solution": ["7", "0.5"]}, 2)])
    worker.close()
    assert [answer.scores for answer in answers] == [[0.0, 1.0]]


def test_maths_runs_no_code_of_a_completion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "__import__('os').system('touch pwned')"
    texts = [code, f"${code}$", f"\\boxed{{{code}}}", f"1+{code}", f"\\operatorname{{{code}}}"]
    assert maths(texts, ["7"] * len(texts)) == [0.0] * len(texts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", range(21))
def test_counting_reads_the_words_up_to_twenty(count):
    words = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"  # noqa: E501
    assert counting([words.split()[count].title() + "."], [count]) == [1.0]


@pytest.mark.parametrize(
    ("text", "gold", "score"), [("9", 10, 0.9), ("11", 10, 0.9), ("1", 10, 0.1), ("20", 10, 0.0), ("2", 4, 0.5)]
)
def test_partial_counts(text, gold, score):
    assert counting([text], [gold], partial=True) == pytest.approx([score])
    assert counting([text], [gold]) == [0.0]


@pytest.mark.parametrize("gold", [-1, 7.5, "many", "7 or 8", float("inf"), True])
def test_a_gold_answer_that_is_no_count_is_a_fault(gold):
    (score,) = counting(["7"], [gold])
    assert isinstance(score, Fault) and score.kind == "type"


@pytest.mark.parametrize("text", ["yes", "YES!", "Yes, it is.", "`true`", "Yes\nbecause", "yes - it is"])
def test_says_yes(text):
    assert yes_no([text, text], ["yes", False]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "text",
    ["yes or no", "yes, no", "Yes and then no", "no; maybe yes", "True/False", "yesterday", "no one", "y"],
)
def test_says_neither_yes_nor_no(text):
    assert yes_no([text, text], [True, False]) == [0.0, 0.0]


def random_text() -> str:
    words = [
        "a",
        "an",
        "the",
        "The",
        "red",
        "Red",
        "car",
        "cars",
        "theme",
        "New York",
        "U.S.",
        "don't",
        "7",
        "é",
        "¿",
        "--",
    ]
    marks = [" ", " ", "  ", "\n", ", ", "-", "."]
    parts = [RNG.choice(words) + RNG.choice(marks) for _ in range(RNG.randint(1, 6))]
    return "".join(parts) + RNG.choice(["", *string.punctuation])


def test_short_answer_agrees_with_squad():
    from transformers.data.metrics.squad_metrics import compute_exact, compute_f1, normalize_answer

    pairs = [(random_text(), random_text()) for _ in range(1_000)]
    pairs = [(answer, gold) for answer, gold in pairs if normalize_answer(gold)]
    answers, golds = [answer for answer, _ in pairs], [gold for _, gold in pairs]
    assert short_answer(answers, golds) == [compute_exact(gold, answer) for answer, gold in pairs]
    f1 = short_answer(answers, golds, metric="f1")
    assert f1 == pytest.approx([compute_f1(gold, answer) for answer, gold in pairs])
    assert len(pairs) > 800 and len({*f1}) > 10


def test_short_answer_refuses_an_unknown_metric():
    with pytest.raises(ValueError, match="neither 'exact' nor 'f1'"):
        BUILT_INS["short_answer"](["a"], ["a"], metric="bleu")
