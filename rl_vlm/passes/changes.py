"""`micro_batch_tokens.jsonl`: one line per change of the token budget of micro-batches.

A resumed run replays the changes after its checkpoint. So it makes the same micro-batches as the first run, and
computes the same sums.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rl_vlm.log.files import BUDGET, atomic_write, disk_errors

BudgetReason = Literal["out_of_memory", "calibration"]
BudgetSetting = int | Literal["auto"]


@dataclass(frozen=True)
class BudgetChange:
    """A change of the budget."""

    step: int
    """The optimizer step of the change, counted from 1."""
    stage: str
    """The stage that starts, or is repeated, with the new budget."""
    micro_batch_tokens: int
    setting: BudgetSetting
    """`memory.micro_batch_tokens` when the change was made. A run with another setting does not replay the change."""
    reason: BudgetReason
    message: str


def read_changes(directory: Path) -> list[BudgetChange]:
    """Return all changes of the run in a directory. Ignore a last line that a killed process left incomplete."""
    path = directory / BUDGET
    if not path.exists():
        return []
    return [BudgetChange(**json.loads(line)) for line in path.read_text().split("\n")[:-1]]


def append_change(directory: Path, change: BudgetChange) -> None:
    """Record a change. Raises CheckpointError if the disk is full."""
    with disk_errors(directory), (directory / BUDGET).open("a") as file:
        file.write(to_line(change))


def write_changes(directory: Path, changes: Sequence[BudgetChange]) -> None:
    """Rewrite the file with these changes. Do nothing if there are no changes and no file."""
    if changes or (directory / BUDGET).exists():
        with atomic_write(directory / BUDGET) as unfinished:
            unfinished.write_text("".join(map(to_line, changes)))


def to_line(change: BudgetChange) -> str:
    return json.dumps(asdict(change)) + "\n"
