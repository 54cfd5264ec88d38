"""The reward functions maths, counting, yes_no and short_answer, beyond the tables of docs/built_in_rewards.md."""

import gc
import random
import re
import string
import threading
import time
from collections.abc import Callable
from functools import partial
from hashlib import pbkdf2_hmac
from typing import Any

import pytest

from rewards.answers.counting import counting
from rewards.answers.maths import limited, maths
from rewards.answers.short_answer import short_answer
from rewards.answers.yes_no import yes_no
from rewards.contract import Fault
from rewards.registry import BUILT_INS, TIMEOUTS
from rewards.worker import Worker
from tests.helpers.cpu_time import stays_within

RNG = random.Random(0)
LONG = [
    *(
        "7" * 100_000,
        "7 " * 50_000,
        "." * 100_000,
        "-" * 100_000,
        "yes" * 30_000,
        "yes and " * 12_000,
        "answer " * 15_000,
    ),
    *("yes. " + "answer " * 15_000, "yes. answer" + " " * 100_000),
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
    scores: list[Any] = []
    gold = "no" if function is yes_no else 1
    assert stays_within(20.0, lambda: scores.extend(function([text], [gold])))  # without bounds it would be minutes
    assert set(scores) == {0.0}


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


@pytest.mark.ci
def test_maths_agrees_with_math_verify():
    from math_verify import parse, verify

    pairs = latex_pairs()
    scores = maths([answer for _, answer in pairs], [gold for gold, _ in pairs])
    assert scores == [
        float(verify(parse(gold, parsing_timeout=30), parse(answer, parsing_timeout=30), timeout_seconds=30))
        for gold, answer in pairs
    ]
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
    started = time.process_time()
    assert maths([text], ["7"]) == [0.0]
    assert time.process_time() - started < 4.0


def test_seconds_that_other_programs_take_do_not_count(monkeypatch):
    monkeypatch.setattr("math_verify.grader.sympy_expr_eq", lambda *_, **__: time.sleep(1.5) or True)
    assert maths(["7"], ["7"]) == [1.0]


def test_the_limit_of_a_step_is_in_the_time_of_its_own_thread(monkeypatch):
    """Other threads compute for longer than the limit while the step waits. Garbage is not collected in a step."""
    monkeypatch.setattr("rewards.answers.maths.SECONDS_PER_STEP", 0.3)
    others = [threading.Thread(target=pbkdf2_hmac, args=("sha256", b"", b"", 1_000_000)) for _ in range(2)]
    began, steps = time.process_time(), []
    with limited():
        for other in others:
            other.start()
        for other in others:
            other.join()
        steps += ["waited", gc.isenabled()]
    assert time.process_time() - began > 0.3
    assert steps == ["waited", False]
    with limited():
        while time.process_time() - began < 60:
            pass
        steps.append("computed")
    assert steps == ["waited", False] and gc.isenabled()


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


@pytest.mark.ci
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


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        *(("5 million", 5), ("3 or thirty", 3), ("3 or forty or fifty", 3), ("three or a dozen", 3), ("3 ½", 3)),
        *(("3²", 3), ("two-thirds", 2), ("two hundred", 2), ("Dozens, about 7", 7), ("3 and a half", 3), ("5k", 5)),
        *(
            ("5M", 5),
            ("No one is there", 1),
            ("no-one", 1),
            ("3 or ７", 3),
            ("3 Ⅶ", 3),
            ("No idea", 0),
            ("nonesuch", 0),
        ),
        *(("There is no way to tell.", 0), ("There are no 7 dogs", 0), ("none or 7", 0), ("There are no", 0)),
    ],
)
def test_other_numbers_are_no_count(text, gold):
    assert counting([text], [gold]) == [0.0]


@pytest.mark.parametrize("text", ["none", "None.", "There are no dogs.", "there are no dogs in this picture", "zero"])
def test_answers_that_mean_zero(text):
    assert counting([text, text], [0, 1]) == [1.0, 0.0]


def test_a_chinese_one_in_a_sentence_is_no_number():
    assert counting(["一共有3只狗。"], [3]) == [1.0]


@pytest.mark.parametrize(
    "gold", [-1, 7.5, "many", "7 or 8", float("inf"), True, "three hundred", "a dozen", "5 million", "3½", "two-thirds"]
)
def test_a_gold_answer_that_is_no_count_is_a_fault(gold):
    (score,) = counting(["7"], [gold])
    assert isinstance(score, Fault) and score.kind == "type"


@pytest.mark.parametrize(
    "text",
    [
        *("yes", "YES!", "Yes, it is.", "`true`", "Yes\nbecause", "yes - it is", "Answer: Yes", "The answer is yes"),
        *(
            '"Yes"',
            "“Yes.”",
            "_Yes_",
            "**Final Answer:** Yes",
            "Final answer\nyes",
            "Yes. So the answer is yes.",
            "Answer:yes",
            "'Yes'",
        ),
    ],
)
def test_says_yes(text):
    assert yes_no([text, text], ["yes", False]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        *("yes or no", "yes, no", "Yes and then no", "no; maybe yes", "True/False", "yesterday", "no one", "y"),
        *("Yes. Actually no.", "Yes. The answer is no", "No. I think that the answer is: yes", "The answer is not yes"),
        *("The answer is yes or no", "The answer is no one", "Answer: Yes. Answer: No."),
    ],
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
        "--",
    ]
    marks = [" ", " ", "  ", "\n", ", ", "-", "."]
    parts = [RNG.choice(words) + RNG.choice(marks) for _ in range(RNG.randint(1, 6))]
    return "".join(parts) + RNG.choice(["", *string.punctuation])


def test_short_answer_agrees_with_squad():
    """Marks before a digit are kept on purpose, where SQuAD removes them."""
    from transformers.data.metrics.squad_metrics import compute_exact, compute_f1, normalize_answer

    pairs = [(random_text(), random_text()) for _ in range(1_000)]
    pairs = [pair for pair in pairs if normalize_answer(pair[1]) and not any(map(re.compile(r"[-.]7").search, pair))]
    answers, golds = [answer for answer, _ in pairs], [gold for _, gold in pairs]
    assert short_answer(answers, golds) == [compute_exact(gold, answer) for answer, gold in pairs]
    f1 = short_answer(answers, golds, metric="f1")
    assert f1 == pytest.approx([compute_f1(gold, answer) for answer, gold in pairs])
    assert len(pairs) > 800 and len({*f1}) > 10


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        *(("15", "1.5", 0.0), ("-5", "5", 0.0), ("1230", "12:30", 0.0), ("1225", "12/25", 0.0), ("78", "7,8", 0.0)),
        *((".5", "5", 0.0), ("-.5", ".5", 0.0), ("12-25", "1225", 0.0), ("1,00", "100", 0.0), ("−5", "5", 0.0)),
        *(("1,000", "1000", 1.0), ("$1,234,567.5", "1234567.5", 1.0), ("1.5.", "1.5", 1.0), ("−5", "-5", 1.0)),
        *(("12–25", "12-25", 1.0), ("12:30 p.m.", "12:30 PM", 1.0), ("7-up", "7up", 1.0), ("B-52", "B52", 1.0)),
        *(("红色。", "红色", 1.0), ("“red”", "red", 1.0), ("¿Qué?", "qué", 1.0), ("don’t", "don't", 1.0)),
        *(("（红色）", "红色", 1.0), ("A", "A", 1.0), ("a.", "A", 1.0), ("the", "A", 0.0), ("", "A", 0.0)),
        *(("a red car", "red car", 1.0), ("dog--5", "dog5", 1.0)),
    ],
)
def test_short_answers_beyond_squad(text, gold, score):
    assert short_answer([text], [gold]) == [score]


@pytest.mark.parametrize("text", ["1," * 100_000, "1,111" * 40_000, "-" * 200_000, "1,111," * 40_000])
def test_long_short_answers_take_no_time(text):
    assert short_answer([text], ["7"]) == [0.0]
    assert stays_within(2.0, lambda: short_answer([text], ["7"]))


def test_short_answer_refuses_an_unknown_metric():
    with pytest.raises(ValueError, match="neither 'exact' nor 'f1'"):
        BUILT_INS["short_answer"](["a"], ["a"], metric="bleu")
