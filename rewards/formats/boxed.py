r"""Reward for a completion with one \boxed{...}."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rewards.text import TextOrMessages, boxed_spans, completion_text

BOX = re.compile(r"\\boxed(?![A-Za-z])")
NO_CONTENT = re.compile(r"[\s{}$~\\]*")


def boxed(completions: Sequence[TextOrMessages]) -> list[float]:
    r"""Return 1.0 if a completion has exactly one `\boxed{...}`, closed and not empty, else 0.0."""
    return [float(_has_one_box(completion_text(completion))) for completion in completions]


def _has_one_box(text: str) -> bool:
    spans = boxed_spans(text)
    return len(BOX.findall(text)) == 1 == len(spans) and not NO_CONTENT.fullmatch(text, *spans[0])
