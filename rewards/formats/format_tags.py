"""Reward for a completion that has the required tags."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rewards.text import TextOrMessages, completion_text

TAG = re.compile(r"[^<>/\s]+")
"""The name of a tag, without its brackets."""


def format_tags(
    completions: Sequence[TextOrMessages], *, tags: Sequence[str] = ("answer",), allow_outside: bool = False
) -> list[float]:
    """Return 1.0 if a completion has each of `tags` exactly once, closed, not empty and in this order, else 0.0.

    Text outside the tags scores 0.0 unless `allow_outside` is True. Raises TypeError or ValueError if no completion
    could have these tags, or if every completion would have them.
    """
    if isinstance(tags, str):
        raise TypeError(f"`tags` is a list of tag names; write [{tags}]")
    names = {tag for tag in tags if TAG.fullmatch(tag)}
    if not tags or len(names) < len(tags):
        raise ValueError(f"`tags` is {list(tags)}; it must be one or more different names of tags, such as answer")
    return [float(_has_format(completion_text(completion), tags, allow_outside)) for completion in completions]


def _has_format(text: str, tags: Sequence[str], allow_outside: bool) -> bool:
    rest = text
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if text.count(start) != 1 or text.count(end) != 1:
            return False
        before, _, rest = rest.partition(start)
        content, _, rest = rest.partition(end)
        if not content.strip() or (before.strip() and not allow_outside):
            return False
    return allow_outside or not rest.strip()
