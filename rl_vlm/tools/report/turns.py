"""Turns of trajectories in a report: for the rollout browser, and the reward by their number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

from rl_vlm.log.completions import values_of
from rl_vlm.log.metrics import is_number
from rl_vlm.log.trajectories import turns_of
from rl_vlm.tools.report.read import LoggedRow, RunResults

AddImage = Callable[[str], int | None]
"""Adds an image to the page, and returns its number there."""
Cut = Callable[[str], str]
"""Shortens a text."""


@dataclass(frozen=True)
class Result:
    """A result of a call, or of a step."""

    text: str
    num_images: int
    """Images and videos."""
    digests: tuple[str, ...]
    """Of its images and videos. Files of earlier versions have none."""
    kept: tuple[str, ...]
    """Paths of the first images and of strips of the first videos, in order."""
    error: str | None

    @classmethod
    def of_file(cls, result: Mapping[str, Any]) -> Result:
        """Read a result of a completions file."""
        digests, kept = (tuple(map(str, result.get(name, ()))) for name in ("digests", "kept"))
        num_images = int(result["images"]) + int(result.get("videos", 0))
        return cls(str(result["text"]), num_images, digests, kept, result["error"])

    def files(self, kept_of: Mapping[str, str]) -> list[str]:
        """Return paths of its images and strips. `kept_of` has paths by digest, of images that another result kept."""
        return [*self.kept, *(kept_of[digest] for digest in self.digests[len(self.kept) :] if digest in kept_of)]


@dataclass(frozen=True)
class ShownTurn:
    """A turn of a completion on the page."""

    text: str
    calls: tuple[str, ...]
    results: tuple[Result, ...]
    figures: dict[str, float]
    """Its reward and its advantage, if it has them."""

    @property
    def seen(self) -> tuple[Any, ...]:
        """Its text and its results. Turns with equal values are the same."""
        return self.text, *((one.text, one.num_images, one.digests, one.error) for one in self.results)


class GroupTurns:
    """The turns of a group of completions. Damaged ones are left out, since the file may come from someone else."""

    def __init__(self, group: Sequence[LoggedRow]) -> None:
        self.starts = [(row["prompt"], row.get("images")) for row in group]
        self.turns = [shown_turns(row) for row in group]
        results = [result for turns in self.turns for turn in turns for result in turn.results]
        self.kept = [path for one in results for path in one.kept]
        """Paths of all kept images."""
        self.kept_of = {digest: path for one in results for digest, path in zip(one.digests, one.kept, strict=False)}
        """Paths of kept images by digest."""

    def described(self, index: int, add: AddImage, cut: Cut) -> list[dict[str, Any]]:
        """Describe the turns of a completion for page.js."""
        return [
            {
                "text": cut(turn.text),
                "calls": list(turn.calls),
                "results": [self.described_result(result, add, cut) for result in turn.results],
                **turn.figures,
            }
            for turn in self.turns[index]
        ]

    def described_result(self, result: Result, add: AddImage, cut: Cut) -> dict[str, Any]:
        """Describe the result of a call, or of calls that could not be read."""
        numbers = [number for path in result.files(self.kept_of) if (number := add(path)) is not None]
        return {
            "text": cut(result.text),
            "images": numbers,
            "left": result.num_images - len(numbers),
            "failed": result.error is not None,
        }

    def parting(self, index: int) -> dict[str, Any] | None:
        """Return the first turn that no other completion shares, and the completions that had the same turns until
        then.

        Return None if another completion shares all turns, or if no other has the same start.
        """
        turns = self.turns[index]
        shared = {
            other: num_equal(turns, self.turns[other])
            for other in range(len(self.turns))
            if other != index and self.starts[other] == self.starts[index]
        }
        longest = max(shared.values(), default=len(turns))
        if longest == len(turns):
            return None
        return {"turn": longest, "from": [other for other, number in shared.items() if number == longest]}


def num_equal(turns: Sequence[ShownTurn], others: Sequence[ShownTurn]) -> int:
    """Return how many turns are equal before the first that is not."""
    return sum(1 for _ in takewhile(lambda pair: pair[0].seen == pair[1].seen, zip(turns, others, strict=False)))


def shown_turns(row: LoggedRow) -> list[ShownTurn]:
    """Return the turns of a row, or none if they are damaged."""
    try:
        return [
            ShownTurn(
                str(turn["text"]),
                tuple(str(call["name"]) for call in turn["calls"]),
                tuple(map(Result.of_file, turn["results"])),
                {name: turn[name] for name in ("reward", "advantage") if is_number(turn.get(name))},
            )
            for turn in turns_of(row)
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


@dataclass(frozen=True)
class OfLength:
    """The completions of a run that have equally many turns."""

    num_turns: int
    num_completions: int
    reward: float | None
    """Mean reward of the completions that have one."""


def reward_by_turns(run: RunResults) -> list[OfLength]:
    """Return the mean reward by number of turns, in training."""
    by_number: dict[int, list[LoggedRow]] = defaultdict(list)
    for row in run.rows:
        if row.get("num_turns") is not None:
            by_number[row["num_turns"]].append(row)
    return [of_length(number, rows) for number, rows in sorted(by_number.items())]


def of_length(num_turns: int, rows: Sequence[LoggedRow]) -> OfLength:
    """Summarize rows of equally many turns."""
    rewards = values_of(rows, "reward")
    return OfLength(num_turns, len(rows), fmean(rewards) if rewards else None)
