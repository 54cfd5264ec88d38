"""Checks of the data that take seconds: columns, the first row of each entry, and the length of the run.

This module imports no torch. Functions of the user may.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rl_vlm.config.batches import endless_warmup, total_optimizer_steps
from rl_vlm.config.data_names import Which
from rl_vlm.config.data_sources import data_sources
from rl_vlm.config.schema import DataConfig
from rl_vlm.data.columns import refuse_unread_media
from rl_vlm.data.samples import FindGold, Rows, load_rows
from rl_vlm.data.sources import NotOpened
from rl_vlm.errors import Finding, Problem
from rl_vlm.reward.function import Reward
from rl_vlm.reward.golds import answer_columns, gold_given
from rl_vlm.tools.checks.diagnosis import DATA, SETTING, Checking, Note, attempt, attempt_call
from rl_vlm.tools.checks.environments import named_environments
from rl_vlm.tools.checks.settings import batches, rewards
from rl_vlm.tools.checks.table import Subject

NUM_READ = 64
"""Number of rows of Parquet and Arrow files that are read."""
REWARD_COLUMNS = Problem("columns of rewards", DATA.remedy)
IMAGE_COLUMNS = Problem("columns of images", DATA.remedy)


def first_rows(subject: Subject) -> Checking[dict[Which, Rows]]:
    """Check the first row of each entry of the data, and the length of a training run."""
    functions, found = subject.value(rewards) or [], {}
    for split in ("train", "eval") if subject.kind == "train" else ("eval",):
        if data_sources(subject.config.data, split):
            rows = yield from attempt(read_first(subject.config.data, split, functions), DATA)
            if rows is not None:
                yield from named_environments(subject, rows)
                found[split] = rows
    if "train" in found:
        yield from attempt(length(subject, len(found["train"]) + found["train"].num_unread))
    return found


def read_first(data: DataConfig, split: Which, functions: Sequence[Reward]) -> Checking[Rows | None]:
    """Check the columns and the first row of each entry. Return None if only the package `datasets` opens the data."""
    try:
        rows = load_rows(data, split, NUM_READ)
    except NotOpened as reason:
        yield Note(f"{split} data: {reason}", is_checked=False)
        return None
    yield from columns(rows, functions)
    find_gold = gold_finder(rows, functions)
    for part in rows.parts:
        if rows.check(part.start, rows.source[part.start]).continues:
            rows.refuse_answered(part.start, find_gold)
    read = "the first was" if len(rows.parts) == 1 else "the first of each entry were"
    yield Note(f"{split} data {rows.name}: {len(rows) + rows.num_unread} rows, of which {read} read")
    return rows


def columns(rows: Rows, functions: Sequence[Reward]) -> Checking[None]:
    """Check that the columns that reward functions need are there, and that every column with images is read."""
    for reward in functions:
        yield from attempt_call(REWARD_COLUMNS, reward.check_columns, {*rows.columns})
    if not rows.num_unread:
        named = {column for reward in functions for column in reward.columns}
        yield from attempt_call(IMAGE_COLUMNS, refuse_unread_media, rows.source, rows.config, rows.name, named)


def gold_finder(rows: Rows, functions: Sequence[Reward]) -> FindGold:
    """Return a function that finds the column whose gold answer a text gives."""
    return partial(gold_given, answer_columns(rows.columns, functions))


def length(subject: Subject, num_rows: int) -> Checking[int | None]:
    """Return the number of optimizer steps of a training run, or None if its batch sizes have no solution."""
    sizes = subject.value(batches)
    if sizes is None:
        return None
    num_steps = total_optimizer_steps(subject.config, sizes, num_rows)
    yield Note(f"length: {num_steps} optimizer steps")
    if warning := endless_warmup(subject.config.train, num_steps):
        kind, remedy = SETTING
        yield Finding("warning", kind, warning, remedy)
    return num_steps
