"""Every row and every image header of a split, and a kind for each problem.

Rows ─ inspect_rows: the checks of rl_vlm/data/check.py ─► RowFacts of each row ─► UsableRows
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Literal, NamedTuple

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import UsableRows, no_gold, over_rows
from rl_vlm.data.columns import refuse_unread_images
from rl_vlm.data.samples import FindGold, Rows, load_rows
from rl_vlm.data.tables import Row
from rl_vlm.errors import DataError
from rl_vlm.reward.golds import answer_columns, gold_given
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.findings import Diagnosis, Finding, Severity

KINDS = (
    (r"No such file", "missing image", "Put the file there, or set data.image_root to the folder of relative paths."),
    (r"data\.max_image_pixels", "image above the pixel cap", "Shrink the file, or raise data.max_image_pixels."),
    (r"not an image in one|image cannot be read", "unreadable image", "Write the file again, or leave the row out."),
    (
        r"image blocks and the row has",
        "marks and images that differ in number",
        "Write one <image> mark per image, or none to have all images put first.",
    ),
    (
        r"without any text|prompt is empty",
        "empty prompt",
        "Write a prompt, or <image> alone for an image without a question.",
    ),
    (r"ends with its answer", "prompt that ends with its answer", "Split it off with data.columns, or leave it out."),
    (r"cannot be filled", "template that cannot be filled", "Fill the columns of data.prompt_template."),
)
"""Kind and remedy of a problem, by what its message holds. The first that fits counts."""
OTHER = ("row that cannot be used", "Change the row as the message says, or leave it out.")
CONTINUED = "Leave the answer out of the prompt, unless completions are to continue it."


class RowFacts(NamedTuple):
    """What is noted of a row."""

    row: int
    problem: str | None
    text: bytes
    """A digest of the prompt's messages, with the places of images."""
    num_images: int
    num_pixels: int
    num_bytes: int
    continues: bool


class Split(NamedTuple):
    """The rows of a split, and what was noted of each."""

    usable: UsableRows
    facts: list[RowFacts]

    @property
    def rows(self) -> Rows:
        return self.usable.rows


def load_split(
    config: RunConfig, split: Literal["train", "eval"], suites: Sequence[RewardSuite], diagnosis: Diagnosis
) -> Split | None:
    """Load a split and check its columns and rows. Returns None if it cannot be loaded or no row can be used."""
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
    """Yield what is noted of every row, in order. Images are read as far as their headers."""
    return over_rows(rows, range(len(rows)), partial(inspect_row, rows, find_gold))


def inspect_row(rows: Rows, find_gold: FindGold, index: int, row: Row) -> RowFacts:
    """Read a row, and its images as far as their headers."""
    try:
        parsed = rows.check(index, row)
        if parsed.continues:
            rows.refuse_answered(index, find_gold)
    except DataError as error:
        return RowFacts(index, str(error), b"", 0, 0, 0, False)
    text = blake2b(json.dumps(parsed.messages).encode(), digest_size=16).digest()
    return RowFacts(
        index, None, text, len(parsed.images), parsed.num_pixels, parsed.num_bytes, parsed.continues
    )  # fmt: skip


def row_findings(rows: Rows, facts: Sequence[RowFacts]) -> list[Finding]:
    """Return a finding for each row that cannot be used, and for each prompt that ends with an answer."""
    severity: Severity = "error" if rows.config.on_bad_row == "raise" else "warning"
    findings = []
    for fact in facts:
        if fact.problem is not None:
            kind, remedy = kind_of(fact.problem)
            findings.append(Finding(severity, kind, fact.problem, remedy, rows.name, fact.row))
        elif fact.continues:
            what = f"{rows.place(fact.row)}: completions continue the message of the assistant that ends the prompt"
            findings.append(Finding("warning", "prompt that ends with an answer", what, CONTINUED, rows.name, fact.row))
    return findings


def kind_of(problem: str) -> tuple[str, str]:
    """Return kind and remedy of a problem, by its message."""
    return next(((kind, remedy) for pattern, kind, remedy in KINDS if re.search(pattern, problem)), OTHER)


def usable_rows(rows: Rows, facts: Sequence[RowFacts]) -> UsableRows:
    """Return the rows without problems, as the run would use them with `on_bad_row: drop`. There may be none."""
    kept = [fact for fact in facts if fact.problem is None]
    return UsableRows(
        rows, [fact.row for fact in kept], [], {fact.row: fact.num_bytes for fact in kept},
        {fact.row: fact.num_pixels for fact in kept},
    )  # fmt: skip
