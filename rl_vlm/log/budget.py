"""`micro_batch_tokens.jsonl`: one line per change of the token budget of micro-batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rl_vlm.log.files import atomic_write
from rl_vlm.memory.budget import BudgetChange, BudgetSetting

BUDGET = "micro_batch_tokens.jsonl"


class BudgetLog:
    """The recorded changes of a run's budget."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, change: BudgetChange) -> None:
        with self.path.open("a") as file:
            file.write(to_line(change))

    def read(self) -> list[BudgetChange]:
        """Return all changes. A line that a killed process has not completed is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")[:-1]
        return [BudgetChange(**json.loads(line)) for line in lines]

    def read_for(self, step: int, setting: BudgetSetting) -> list[BudgetChange]:
        """Return what a run needs that continues after `step`: earlier changes, and later ones by runs with this
        `micro_batch_tokens`, to replay.
        """
        return [change for change in self.read() if change.step <= step or change.setting == setting]

    def write(self, changes: Sequence[BudgetChange]) -> None:
        """Replace the file, if there is one or there are changes."""
        if not changes and not self.path.exists():
            return
        with atomic_write(self.path) as unfinished:
            unfinished.write_text("".join(map(to_line, changes)))


def to_line(change: BudgetChange) -> str:
    return json.dumps(asdict(change)) + "\n"
