"""Turns of trajectories in a report: for the rollout browser, and the reward by their number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rl_vlm.log.trajectories import turns_of
from rl_vlm.tools.report.read import Row, RunResults, values_of

AddImage = Callable[[str], int | None]
"""Adds an image to the page, and returns its number there."""
Cut = Callable[[str], str]
"""Shortens a text."""


def described_turns(row: Row, add: AddImage, cut: Cut) -> list[dict[str, Any]]:
    """Describe the turns of a row for page.js. Leave out damaged ones, since the file may come from someone else."""
    try:
        return [
            {
                "text": cut(str(turn["text"])),
                "calls": [str(call["name"]) for call in turn["calls"]],
                "results": [described_result(result, add, cut) for result in turn["results"]],
            }
            for turn in turns_of(row)
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def described_result(result: Mapping[str, Any], add: AddImage, cut: Cut) -> dict[str, Any]:
    """Describe the result of a call, or of calls that could not be read."""
    numbers = [number for name in result.get("kept", ()) if (number := add(str(name))) is not None]
    return {
        "text": cut(str(result["text"])),
        "images": numbers,
        "left": int(result["images"]) - len(numbers),
        "failed": result["error"] is not None,
    }


@dataclass(frozen=True)
class OfLength:
    """The completions of a run that have equally many turns."""

    num_turns: int
    num_completions: int
    reward: float | None
    """Mean of those that have a reward."""


def reward_by_turns(run: RunResults) -> list[OfLength]:
    """Return the mean reward by number of turns, in training."""
    by_number: dict[int, list[Row]] = defaultdict(list)
    for row in run.rows:
        if row.get("num_turns") is not None:
            by_number[row["num_turns"]].append(row)
    return [of_length(number, rows) for number, rows in sorted(by_number.items())]


def of_length(num_turns: int, rows: Sequence[Row]) -> OfLength:
    """Summarize rows of equally many turns."""
    rewards = values_of(rows, "reward")
    return OfLength(num_turns, len(rows), fmean(rewards) if rewards else None)
