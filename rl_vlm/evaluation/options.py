"""Options of `rl-vlm eval` that are not settings, and checks of them against rewards and data. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rl_vlm.data.samples import Rows
from rl_vlm.data.tables import is_plain
from rl_vlm.errors import ConfigError
from rl_vlm.reward.suite import RewardSuite


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of one call that are not in the config."""

    by: Sequence[str] = ()
    """Data columns. The figures are repeated for each of their values."""
    keep: tuple[float, float] | None = None
    """Range of success rates. Prompts in the range are written to a dataset."""
    keep_by: str | None = None
    """Reward function that decides about success. Default: the one with the largest weight."""


NO_OPTIONS = EvaluationOptions()


@dataclass(frozen=True)
class SuccessRange:
    """The range of success rates to keep, both bounds included. One reward function decides about success."""

    low: float
    high: float
    function: str
    solved_from: float = 1.0
    """A completion succeeds with this score or more."""


def success_range(
    low: float, high: float, name: str | None, rewards: RewardSuite, num_generations: int
) -> SuccessRange:
    """Build the range for function `name`, or for the one with the largest weight.

    Raises ConfigError if no function has that name, if several have the largest weight, or if no prompt can lie in the
    range.
    """
    largest = [
        known for known, weight in zip(rewards.names, rewards.weights, strict=True) if weight == max(rewards.weights)
    ]
    if name is not None and name not in rewards.names:
        raise ConfigError(f"--keep-by {name}: no reward function has that name; there are {', '.join(rewards.names)}")
    if name is None and len(largest) > 1:
        raise ConfigError(
            f"--keep: the reward functions {', '.join(largest)} have the same weight; choose the one that decides "
            "whether a completion succeeds with --keep-by"
        )
    if not any(low <= count / num_generations <= high for count in range(num_generations + 1)):
        rates = ", ".join(str(Fraction(count, num_generations)) for count in range(num_generations + 1))
        raise ConfigError(
            f"--keep {low:g}..{high:g}: no success rate is in this range. With rollout.num_generations_eval "
            f"{num_generations}, a success rate is one of {rates}; sample more completions per prompt"
        )
    function = name or largest[0]
    return SuccessRange(low, high, function, rewards.solved_from[function])


def kept_range(options: EvaluationOptions, rewards: RewardSuite, num_generations: int) -> SuccessRange | None:
    """Return the range of `--keep`. Raises ConfigError if options and rewards do not fit."""
    if options.keep is not None:
        return success_range(*options.keep, options.keep_by, rewards, num_generations)
    if options.keep_by is not None:
        raise ConfigError(
            f"--keep-by {options.keep_by} has no effect without --keep; add a range, as in --keep 0.1..0.9"
        )
    return None


def check_by(options: EvaluationOptions, rows: Rows) -> None:
    """Raise ConfigError if a column of `--by` is missing in the data, or does not hold text or numbers."""
    plain = [column for column in rows.columns if is_plain(rows.first_value(column))]
    for column in options.by:
        if column not in plain:
            raise ConfigError(f"--by {column}: the data's columns of text and numbers are {', '.join(plain) or 'none'}")


def checkpoint_names(checkpoints: Sequence[str]) -> dict[str, str]:
    """Name checkpoints by the last part of their path, or by the whole path if last parts are the same.

    Raises ConfigError if a checkpoint is named twice.
    """
    lasts = [Path(checkpoint).name for checkpoint in checkpoints]
    names = lasts if len(set(lasts)) == len(lasts) else [str(Path(checkpoint)) for checkpoint in checkpoints]
    named = {re.sub(r"[^\w.-]+", "_", name): checkpoint for name, checkpoint in zip(names, checkpoints, strict=True)}
    if len(named) < len(checkpoints):
        raise ConfigError(f"--checkpoint names a checkpoint twice: {', '.join(checkpoints)}; leave one out")
    return named
