"""Gold texts of a row, and the form in which texts are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rewards.contract import Fault, Score
from rewards.text import Completion, completion_text, composed, final_text, gold_text


def best_scores(
    completions: Sequence[Completion],
    solution: Sequence[Any],
    prepare: Callable[[str], Sequence[Any]],
    score: Callable[[Any, Any], float],
) -> list[Score]:
    """Return the score of each answer against the gold text that fits best.

    `prepare` turns an answer and a gold text into what `score` compares. A gold text of which nothing is left is no
    gold text.
    """

    def scored(completion: Completion, gold: Any) -> Score:
        texts = gold_texts(gold)
        if isinstance(texts, Fault):
            return texts
        references = [reference for reference in map(prepare, texts) if reference]
        answer = prepare(final_text(completion_text(completion)))
        return max((score(answer, reference) for reference in references), default=None)

    return [scored(completion, gold) for completion, gold in zip(completions, solution, strict=True)]


def gold_texts(solution: Any) -> list[str] | Fault:
    """Return the gold texts of a row, which has one or a list of them; a fault if one cannot be compared."""
    solution = solution.tolist() if hasattr(solution, "tolist") else solution  # NumPy arrays
    texts = [gold_text(gold) for gold in (solution if isinstance(solution, list | tuple) else [solution])]
    fault = next((text for text in texts if isinstance(text, Fault)), None)
    return fault or [final_text(text) for text in texts if isinstance(text, str)]


def normalized(text: str, ignore_case: bool, normalize_whitespace: bool) -> str:
    """Return the text in Unicode's form NFC, if wanted in lower case and with runs of whitespace as one space."""
    text = " ".join(text.split()) if normalize_whitespace else text.strip()
    text = composed(text)
    return text.lower() if ignore_case else text
