"""Reward for a completion that has the required tags."""

from __future__ import annotations

from collections.abc import Sequence

from rewards.text import Completion, completion_text


def format_tags(
    completions: Sequence[Completion], *, tags: Sequence[str] = ("answer",), allow_outside: bool = False
) -> list[float]:
    """Return 1.0 if a completion has each of `tags` exactly once, closed, not empty and in this order, else 0.0.

    Text outside the tags scores 0.0 unless `allow_outside` is True.
    """
    if isinstance(tags, str):
        raise TypeError(f"`tags` is a list of tag names; write [{tags}]")
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
