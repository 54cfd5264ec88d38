"""Reward for prose in the wanted language."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rewards.contract import Score
from rewards.text import TextOrMessages, completion_text

SHORTEST_PIECE = 40
"""Minimum bytes of letters in a piece, to guess its language: 40 Latin letters or 14 Chinese ones."""
MOST_PIECES = 200
LONGEST_TEXT = 100_000
"""Maximum characters of a completion that are read."""

NO_PROSE = re.compile(
    r"""``` [^`]* (?:```|\Z) | ` [^`\n]* ` | \$\$ [^$]* \$\$ | \$ [^$\n]* \$
    | \\\[ (?:[^\\]|\\(?![\[\]]))* \\\] | \\\( (?:[^\\]|\\(?![()]))* \\\)  # up to the next bracket, so in linear time
    | < [^<>\n]{1,200} > | https?://\S+ | \\[A-Za-z]+""",
    re.VERBOSE,
)
"""Code in backticks, maths in dollars or LaTeX brackets, tags, addresses and LaTeX commands."""
SENTENCE_END = re.compile(r"(?<=[.!?。！？؟।\n])")


def language(completions: Sequence[TextOrMessages], *, language: str = "en") -> list[Score]:
    """Return the share of the prose, measured in letters, that is in a language; None if there is too little prose.

    The language consistency of DeepSeek-R1 (arXiv:2501.12948), by sentences. Raises ValueError if the language is
    unknown.
    """
    identifier = _identifier()
    if language not in identifier.labels:
        raise ValueError(f"language={language!r} is none of py3langid's codes: {', '.join(identifier.labels)}")
    return [_share(completion_text(completion), language, identifier) for completion in completions]


def _share(text: str, language: str, identifier: Any) -> float | None:
    found = [(num_letters(piece), identifier.classify(piece)[0]) for piece in pieces(text)]
    total = sum(num for num, _ in found)
    return sum(num for num, code in found if code == language) / total if total else None


def pieces(text: str) -> Iterator[str]:
    """Yield the prose of a text in long enough pieces of whole sentences. Yield nothing if it is too short."""
    prose = NO_PROSE.sub(" ", text[:LONGEST_TEXT])
    shortest = max(SHORTEST_PIECE, num_letters(prose) // MOST_PIECES)
    piece, num, left = "", 0, num_letters(prose)
    for sentence in SENTENCE_END.split(prose):
        piece, num = piece + sentence, num + num_letters(sentence)
        if num >= shortest and left - num >= shortest:
            yield piece
            piece, num, left = "", 0, left - num
    if left >= SHORTEST_PIECE:
        yield piece


def num_letters(text: str) -> int:
    """Count the UTF-8 bytes of a text's letters."""
    return len("".join(filter(str.isalpha, text)).encode(errors="replace"))


@functools.cache
def _identifier() -> Any:
    """Load py3langid's model once."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)
