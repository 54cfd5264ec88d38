"""The built-in reward functions by name. Their keyword-only parameters are settings; the others are columns."""

from __future__ import annotations

from rewards.choice import choice
from rewards.contract import RewardFunction
from rewards.exact_match import exact_match
from rewards.format_tags import format_tags
from rewards.numeric import numeric

BUILT_INS: dict[str, RewardFunction] = {
    "choice": choice,
    "exact_match": exact_match,
    "format_tags": format_tags,
    "numeric": numeric,
}
