"""Lengths of completions in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rewards.contract import Fault
from rewards.text import TextOrMessages, completion_text


def num_tokens(completion: TextOrMessages, token_ids: Sequence[int]) -> int | Fault:
    """Return the number of tokens of a completion, or a fault if it has text but no tokens.

    An endpoint returns text without token ids.
    """
    if not len(token_ids) and completion_text(completion):
        return Fault("type", "`completion_ids` is empty but the completion is not; an endpoint gives no token ids")
    return len(token_ids)
