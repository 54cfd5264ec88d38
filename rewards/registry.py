"""The built-in reward functions by name. Their keyword-only parameters are settings; the others are columns."""

from __future__ import annotations

from rewards.answers.choice import choice
from rewards.answers.exact_match import exact_match
from rewards.answers.numeric import numeric
from rewards.contract import RewardFunction
from rewards.formats.format_tags import format_tags

BUILT_INS: dict[str, RewardFunction] = {
    "choice": choice,
    "exact_match": exact_match,
    "format_tags": format_tags,
    "numeric": numeric,
}

PACKAGES: dict[str, tuple[str, ...]] = {}
"""Packages of the extra `rl-vlm[rewards]` that a function imports when it is called, by the names of their modules."""

TIMEOUTS: dict[str, float] = {}
"""Timeouts in seconds of functions that run in a worker process, if the run does not set another."""
