"""Reward for a text that has the words of the gold text in its order."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from rewards.contract import Score
from rewards.overlap.references import best_scores
from rewards.text import TextOrMessages, composed

LONGEST_RATIO = 20
"""An answer with more than this many times the words of the gold text scores 0.0 instead of 2 / 21 or less."""

# Scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, Han.
UNSPACED = re.compile(
    "([\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U000323af])"
)


def rouge_l(completions: Sequence[TextOrMessages], solution: Sequence[Any]) -> list[Score]:
    """Return the F1 score of the longest common subsequence of words (ROUGE-L); None if there is no gold text."""
    return best_scores(completions, solution, words, f1)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case.

    A word is a run of letters, digits and their marks. In scripts without spaces between words, each character is one.
    """
    text = composed(text.lower())
    spaced = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text)
    return UNSPACED.sub(r" \1 ", spaced).split()


def f1(answer: list[str], gold: list[str]) -> float:
    """Return 2PR / (P + R) with P = LCS / |answer| and R = LCS / |gold|, which is 2 LCS / (|answer| + |gold|)."""
    from rapidfuzz.distance import LCSseq

    if len(answer) > LONGEST_RATIO * len(gold):
        return 0.0
    return 2 * LCSseq.similarity(answer, gold) / (len(answer) + len(gold))
