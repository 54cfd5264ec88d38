"""Gold texts of a row, and the form in which texts are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rewards.contract import Fault, Score
from rewards.text import TextOrMessages, composed, final_text, gold_text, score_golds


def best_scores(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    prepare: Callable[[str], Sequence[Any]],
    score: Callable[[Any, Any], float],
) -> list[Score]:
    """Return the score of each answer against the gold text that fits best.

    `prepare` converts answers and gold texts for `score`. If it leaves nothing of a gold text, the gold text does not
    count.
    """

    def best(text: str, golds: list[str]) -> Score:
        references = [reference for reference in map(prepare, golds) if reference]
        answer = prepare(final_text(text))
        return max((score(answer, reference) for reference in references), default=None)

    return score_golds(completions, map(gold_texts, solution), best)


def gold_texts(solution: Any) -> list[str] | Fault:
    """Return a row's gold text, or list of gold texts, as a list. Return a fault if one cannot be compared."""
    solution = solution.tolist() if hasattr(solution, "tolist") else solution  # NumPy arrays
    texts = [gold_text(gold) for gold in (solution if isinstance(solution, list | tuple) else [solution])]
    fault = next((text for text in texts if isinstance(text, Fault)), None)
    return fault or [final_text(text) for text in texts if isinstance(text, str)]


def normalized(text: str, ignore_case: bool, normalize_whitespace: bool) -> str:
    """Convert the text to Unicode's form NFC and, if wanted, to lower case and single spaces."""
    text = " ".join(text.split()) if normalize_whitespace else text.strip()
    text = composed(text)
    return text.lower() if ignore_case else text
