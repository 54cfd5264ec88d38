"""Check every row and every image header of a split.

Rows ─ inspect_rows: the checks of rl_vlm/data/check.py ─► RowFacts of each row ─► UsableRows
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Literal, NamedTuple

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import RowNote, UsableRows, inspect_row, no_gold, over_rows
from rl_vlm.data.columns import refuse_unread_images
from rl_vlm.data.samples import FindGold, Rows, load_rows
from rl_vlm.data.tables import Row
from rl_vlm.errors import Finding
from rl_vlm.reward.golds import answer_columns, gold_given
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import Diagnosis

CONTINUED = "Leave the answer out of the prompt, unless completions are to continue it."


class RowFacts(NamedTuple):
    """Facts about a row, for the other checks."""

    note: RowNote
    text: bytes = b""
    """Digest of the prompt's messages, including the places of images."""
    num_images: int = 0

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


def load_split(
    config: RunConfig, split: Literal["train", "eval"], suites: Sequence[RewardSuite], diagnosis: Diagnosis
) -> Split | None:
    """Load a split and check its columns and rows. Returns None if it is not set or cannot be loaded."""
    data = config.data
    if (data.dataset_name if split == "train" else data.eval_dataset_name) is None:
        return None
    remedy = "Change the data or the setting that the message names."
    with diagnosis.noting("data", remedy):
        rows = load_rows(data, split)
        for suite in suites:
            with diagnosis.noting("columns of rewards", remedy):
                suite.check_columns(rows.columns)
        with diagnosis.noting("columns of images", remedy):
            refuse_unread_images(rows.source, data, rows.name, {name for suite in suites for name in suite.columns})
        golds = answer_columns(rows.columns, [reward for suite in suites for reward in suite.functions])
        facts = list(inspect_rows(rows, partial(gold_given, golds)))
        diagnosis.findings += row_findings(rows, facts)
        diagnosis.checked.append(f"{split} data {rows.name}: {len(rows)} rows and the headers of their images")
        return Split(usable_rows(rows, facts), facts)


def inspect_rows(rows: Rows, find_gold: FindGold = no_gold) -> Iterator[RowFacts]:
    """Yield the facts about every row, in order. Read only the headers of images."""
    return over_rows(rows, range(len(rows)), partial(facts_of, rows, find_gold))


def facts_of(rows: Rows, find_gold: FindGold, index: int, row: Row) -> RowFacts:
    """Read a row and the headers of its images."""
    note, parsed = inspect_row(rows, find_gold, index, row)
    if parsed is None:
        return RowFacts(note)
    text = blake2b(json.dumps(parsed.messages).encode(), digest_size=16).digest()
    return RowFacts(note, text, len(parsed.images))


def row_findings(rows: Rows, facts: Sequence[RowFacts]) -> Iterator[Finding]:
    """Yield a finding for each row that cannot be used, and for each prompt that ends with an answer."""
    for note in (fact.note for fact in facts):
        if note.finding is not None:
            yield note.finding
        elif note.continues:
            what = f"{rows.place(note.row)}: completions continue the message of the assistant that ends the prompt"
            yield Finding("warning", "prompt that ends with an answer", what, CONTINUED, rows.name, note.row)


def usable_rows(rows: Rows, facts: Sequence[RowFacts]) -> UsableRows:
    """Return the rows without findings, which the run uses with `on_bad_row: drop`. There may be none."""
    kept = [fact.note for fact in facts if fact.is_usable]
    return UsableRows(
        rows, [note.row for note in kept], [], {note.row: note.num_bytes for note in kept},
        {note.row: note.num_pixels for note in kept},
    )  # fmt: skip
