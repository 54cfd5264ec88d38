"""Checks the settings of a built-in reward function before it scores a completion."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from inspect import Parameter
from typing import Any, get_type_hints

from rewards.calling import background_loop, parameters
from rewards.contract import RewardFunction
from rewards.registry import LARGEST_SCORES
from rl_vlm.config.typed import why_not
from rl_vlm.errors import RewardError, shorten, text_of


def check_settings(name: str, function: RewardFunction, settings: Mapping[str, Any], solved_from: float) -> None:
    """Raise RewardError if the built-in `name` cannot use its settings, or cannot score as high as `solved_from`.

    A built-in raises an error for invalid settings before it reads a completion. So a call without completions checks
    them.
    """
    check_types(name, function, settings)
    columns = {key: [] for key, p in parameters(function).items() if p.default is Parameter.empty}
    try:
        returned = function(**columns, **settings)
        if inspect.iscoroutine(returned):
            asyncio.run_coroutine_threadsafe(returned, background_loop("rewards")).result()
    except Exception as error:
        raise RewardError(f"reward function {name!r}: {text_of(error)}") from error
    largest = LARGEST_SCORES[name](settings) if name in LARGEST_SCORES else 1.0
    if solved_from > max(largest, 1.0):
        raise RewardError(
            f"reward function {name!r} has solved_from {solved_from:g}, but its largest score is {largest:g}: no "
            f"completion would count as solved; set solved_from to {largest:g} or less"
        )


def check_types(name: str, function: RewardFunction, settings: Mapping[str, Any]) -> None:
    """Raise RewardError if a setting does not have the type that the function declares."""
    types = get_type_hints(function)
    for key, value in settings.items():
        if reason := why_not(value, types[key]):
            raise RewardError(f"reward function {name!r}: `{key}` is {shorten(repr(value), 60)}: {reason}")
