"""The reward function of the campaign's runs."""

from __future__ import annotations

import time
from typing import Any

from tests.helpers.tiny_run import coin, token_sum


def slowly(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Score by the tokens and by random numbers, after a while in which a signal can come."""
    time.sleep(0.05)
    drawn = coin(completion_ids)
    return [score + 0.1 * number for score, number in zip(token_sum(completion_ids), drawn, strict=True)]
