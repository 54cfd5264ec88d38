"""Check every row and every image header of a split.

Rows ─ inspect_rows: the checks of rl_vlm/data/check.py ─► RowFacts of each row ─► UsableRows
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from rl_vlm.config.data_names import Which
from rl_vlm.config.data_sources import data_sources
from rl_vlm.config.schema import DataConfig
from rl_vlm.data.check import RowNote, UsableRows, inspect_row, no_gold, over_rows
from rl_vlm.data.samples import FindGold, Rows, load_rows
from rl_vlm.data.tables import TableRow
from rl_vlm.errors import Finding, Severity
from rl_vlm.reward.function import Reward
from rl_vlm.tools.checks.diagnosis import DATA, Checking, Note, attempt
from rl_vlm.tools.checks.environments import named_environments
from rl_vlm.tools.checks.first_rows import columns, gold_finder, length
from rl_vlm.tools.checks.settings import rewards
from rl_vlm.tools.checks.table import Subject

CONTINUED = "Leave the answer out of the prompt, unless completions are to continue it."


class RowFacts(NamedTuple):
    """Facts about a row, for the other checks."""

    rows: Rows
    note: RowNote
    text: bytes = b""
    """Digest of the prompt's messages, including the places of images and videos."""
    num_media: int = 0
    """Number of images and videos."""

    @property
    def row(self) -> int:
        return self.note.row

    @property
    def is_usable(self) -> bool:
        return self.note.finding is None


class Split(NamedTuple):
    """The usable rows of a split, and the facts about all its rows."""

    usable: UsableRows
    facts: list[RowFacts]

    @property
    def rows(self) -> Rows:
        return self.usable.rows


class Splits(NamedTuple):
    """The training and held-out rows. One of them is None if it is not set or cannot be loaded."""

    train: Split | None
    held_out: Split | None
    num_steps: int
    """Number of optimizer steps of the run, or 1 if it is not known."""

    @property
    def loaded(self) -> list[Split]:
        """Return the splits that are loaded, the training rows first."""
        return [split for split in (self.train, self.held_out) if split is not None]


def every_row(subject: Subject) -> Checking[Splits]:
    """Check the columns and all rows of both splits, and the length of the run."""
    data, functions, splits = subject.config.data, subject.value(rewards) or [], []
    for split in ("train", "eval"):
        reading = read_split(data, split, functions)
        splits.append((yield from attempt(reading, DATA)) if data_sources(data, split) else None)
        if splits[-1] is not None:
            yield from named_environments(subject, splits[-1].rows)
    train, held_out = splits
    steps = (yield from attempt(length(subject, len(train.usable)))) if train and len(train.usable) else None
    return Splits(train, held_out, steps or 1)


def read_split(data: DataConfig, split: Which, functions: Sequence[Reward]) -> Checking[Split]:
    """Load a split, and check its columns and rows."""
    rows = load_rows(data, split)
    yield from columns(rows, functions)
    facts = list(inspect_rows(rows, gold_finder(rows, functions)))
    yield from row_findings(rows, facts)
    media = "images and videos" if any(fact.note.headers for fact in facts) else "images"
    yield Note(f"{split} data {rows.name}: {len(rows)} rows and the headers of their {media}")
    return Split(usable_rows(rows, facts), facts)


def about_row(rows: Rows, row: int, kind: str, what: str, remedy: str, severity: Severity = "warning") -> Finding:
    """Build a finding about a row. The message begins with its place."""
    return Finding(severity, kind, f"{rows.place(row)}{what}", remedy, rows.name, row)


def inspect_rows(rows: Rows, find_gold: FindGold = no_gold) -> Iterator[RowFacts]:
    """Yield the facts about every row, in order. Read only the headers of images."""
    return over_rows(rows, range(len(rows)), partial(facts_of, rows, find_gold))


def facts_of(rows: Rows, find_gold: FindGold, index: int, row: TableRow) -> RowFacts:
    """Read a row and the headers of its images."""
    note, parsed = inspect_row(rows, find_gold, index, row)
    if parsed is None:
        return RowFacts(rows, note)
    text = blake2b(json.dumps(parsed.messages).encode(), digest_size=16).digest()
    return RowFacts(rows, note, text, len(parsed.images) + len(parsed.videos))


def row_findings(rows: Rows, facts: Sequence[RowFacts]) -> Iterator[Finding]:
    """Yield a finding for each row that cannot be used, and for each prompt that ends with an answer."""
    for note in (fact.note for fact in facts):
        if note.finding is not None:
            yield note.finding
        elif note.continues:
            what = ": completions continue the message of the assistant that ends the prompt"
            yield about_row(rows, note.row, "prompt that ends with an answer", what, CONTINUED)


def usable_rows(rows: Rows, facts: Sequence[RowFacts]) -> UsableRows:
    """Return the rows without findings, which the run uses with `on_bad_row: drop`. There may be none."""
    kept = [fact.note for fact in facts if fact.is_usable]
    return UsableRows.of_notes(rows, [note.row for note in kept], kept)
