"""The functions that shape lengths, repetition and language, against the functions they come from."""

import math
import random

import numpy as np
import pytest
from trl.rewards.other_rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

from rewards.contract import Fault
from rewards.shaping.cosine_length import cosine_length
from rewards.shaping.language import language, pieces
from rewards.shaping.overlong import overlong
from rewards.shaping.repetition import repetition
from tests.helpers.cpu_time import stays_within


def test_overlong_agrees_with_trl():
    rng = random.Random(0)
    for _ in range(20):
        maximum = rng.randint(1, 500)
        cache = rng.randint(0, maximum)
        ids = [[1] * rng.randint(0, 600) for _ in range(50)]
        expected = get_soft_overlong_punishment(maximum, cache)(ids)
        found = overlong([""] * 50, ids, max_completion_length=maximum, soft_punish_cache=cache)
        assert found == pytest.approx(expected, abs=1e-12)


def test_repetition_of_tokens_agrees_with_trl():
    rng = random.Random(0)
    for _ in range(1000):
        size, penalty = rng.randint(1, 5), -2 * rng.random()
        ids = [rng.randint(0, 4) for _ in range(rng.randint(0, 40))]
        expected = get_repetition_penalty_reward(size, penalty)([ids])
        text = "a" if ids else ""
        assert repetition([text], [ids], unit="tokens", ngram_size=size, max_penalty=penalty) == pytest.approx(expected)


def test_repetition_of_words_is_that_of_their_numbers():
    rng = random.Random(0)
    for _ in range(300):
        numbers = [rng.randint(0, 3) for _ in range(rng.randint(0, 30))]
        text = " \n".join("Zero one TWO Three".split()[number] for number in numbers)
        assert repetition([text], [[]]) == pytest.approx(get_repetition_penalty_reward(3, -1.0)([numbers]))


def open_r1_cosine(is_correct: bool, length: int, max_len: int) -> float:
    """The formula of Open-R1 with its defaults."""
    low, high = (0.5, 1.0) if is_correct else (-0.5, -1.0)
    return low + 0.5 * (high - low) * (1.0 + math.cos(length / max_len * math.pi))


def test_the_cosine_is_that_of_open_r1_up_to_its_length_and_never_rises_again():
    lengths = [1, 10, 250, 500, 999, 1000]
    for is_correct, answer in ((True, "7"), (False, "8")):
        found = cosine_length([answer] * 6, [[1] * length for length in lengths], ["7"] * 6)
        assert found == pytest.approx([open_r1_cosine(is_correct, length, 1000) for length in lengths])
        at_the_end, beyond, twice = cosine_length([answer] * 3, [[1] * n for n in (1000, 1500, 2000)], ["7"] * 3)
        assert at_the_end == beyond == twice == (0.5 if is_correct else -0.5)


def test_a_correct_answer_always_scores_more_than_a_wrong_one():
    lengths = range(1, 3000, 100)
    correct, wrong = (cosine_length([text] * 30, [[1] * n for n in lengths], ["7"] * 30) for text in ("7", "8"))
    assert np.min(correct) > 0 > np.max(wrong)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_no_tokens_of_a_text_are_a_fault_and_not_a_length_of_zero():
    for scores in (
        overlong(["7"], [[]], max_completion_length=5),
        cosine_length(["7"], [[]], ["7"]),
        repetition(["7"], [[]], unit="tokens"),
    ):
        assert isinstance(scores[0], Fault) and "no token ids" in scores[0].message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: overlong([], []), "needs `max_completion_length`"),
        (lambda: overlong([], [], max_completion_length=4, soft_punish_cache=5), "soft_punish_cache=5 is not between"),
        (lambda: overlong([], [], max_completion_length=4, soft_punish_cache=-1), "soft_punish_cache=-1"),
        (lambda: repetition([], [], max_penalty=1.0), "max_penalty=1.0"),
        (lambda: repetition([], [], max_penalty=math.nan), "max_penalty=nan"),
        (lambda: repetition([], [], ngram_size=0), "ngram_size=0"),
        (lambda: repetition([], [], unit="letters"), "unit='letters'"),  # pyright: ignore[reportArgumentType]
        (lambda: cosine_length([], [], [], correct="judge"), "correct='judge' is none of choice, exact_match, numeric"),
        (lambda: cosine_length([], [], [], max_len=0), "max_len=0"),
        (lambda: cosine_length([], [], [], max_value_wrong=0.6), "must not score more"),
        (lambda: cosine_length([], [], [], max_value_correct=math.nan), "must not score more"),
        (lambda: language([], language="english"), "language='english' is none of py3langid's codes"),
    ],
)
def test_settings_without_a_meaning_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ENGLISH = "The picture shows a small brown dog that runs along the beach."
GERMAN = "Auf dem Bild läuft ein kleiner brauner Hund am Strand entlang."
FRENCH = "Sur la photo, un petit chien brun court le long de la plage."
SPANISH = "En la imagen, un perro pequeño y marrón corre por la playa."
CHINESE = "图片上有一只棕色的小狗在沙滩上奔跑，天空很蓝，海水也很清澈。"


@pytest.mark.parametrize(
    ("code", "text"), [("en", ENGLISH), ("de", GERMAN), ("fr", FRENCH), ("es", SPANISH), ("zh", CHINESE)]
)
def test_a_sentence_is_in_its_language(code, text):
    others = {"en", "de", "fr", "es", "zh"} - {code}
    assert language([text], language=code) == [1.0]
    assert [language([text], language=other) for other in others] == [[0.0]] * 4


def test_the_share_is_that_of_letters():
    num_english = sum(map(str.isalpha, ENGLISH))
    num_german = len("".join(filter(str.isalpha, GERMAN)).encode())
    text = f"{ENGLISH}\n{GERMAN} {ENGLISH}"
    assert language([text]) == [pytest.approx(2 * num_english / (2 * num_english + num_german))]


@pytest.mark.parametrize(
    "hidden",
    [
        f"```\n{GERMAN}\n```", f"```{GERMAN}", f"`{GERMAN}`", f"${GERMAN}$", f"\\[ x[1] {GERMAN} \\]",
        f"\\({GERMAN}\\)", "https://example.org/ein-kleiner-brauner-hund-am-strand-entlang", "\\frac\\alpha" * 20,
        "<das-ist-eine-lange-marke-auf-deutsch-und-kein-text>", "1 + 2 = 3 " * 50,
    ],
)  # fmt: skip
def test_code_maths_and_tags_are_no_prose(hidden):
    assert language([f"{ENGLISH} {hidden}"]) == [1.0]
    assert language([hidden]) == [None]


def test_pieces_are_whole_sentences_of_forty_letters_or_more():
    assert list(pieces("Yes. No. " * 3)) == []
    text = f"Yes. {ENGLISH} No. Well.\n{GERMAN} Ja."
    assert [piece.strip() for piece in pieces(text)] == [f"Yes. {ENGLISH}", f"No. Well.\n{GERMAN} Ja."]
    assert len(list(pieces(ENGLISH * 1000))) <= 200


@pytest.mark.parametrize(
    "junk", ["\\[", "\\(", "`", "```", "$", "<", "\\[\\(", ". ", "a. ", "猫。", "$a\n", "```a`", "\x00"]
)
def test_hostile_texts_take_little_time(junk):
    text = (junk * 100_000)[:100_000]
    language([ENGLISH])
    assert language([text])[0] in (None, 0.0)
    assert stays_within(2.0, lambda: (language([text]), repetition([text], [[1]])))
