"""The columns of the data: drops and renames them, lists their readers, and refuses media that nobody reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
from PIL.Image import Image

from rl_vlm.config.data_sources import has_draws
from rl_vlm.config.schema import DataConfig, DataSource
from rl_vlm.data.images import looks_like_image
from rl_vlm.data.layouts import LAYOUT_COLUMNS, LAYOUTS, layouts_of, read_layout
from rl_vlm.data.media import BASE64
from rl_vlm.data.tables import MEDIA_COLUMNS, ArrowRows, ListRows, Table, is_filled
from rl_vlm.data.video.values import looks_like_video
from rl_vlm.errors import DataError, did_you_mean, shorten

logger = logging.getLogger(__name__)


def choose_columns(source: ListRows | ArrowRows, entry: DataSource, is_only: bool) -> Table:
    """Drop `ignore_columns`, and rename columns as `columns` says. `is_only` means that the run has no other data.

    Raises DataError if a column to drop is misspelt, if a column to rename is missing, or if a new name is taken.
    """
    check_ignored(source, entry, is_only)
    names = {column: column for column in source.columns if column not in entry.ignore_columns}
    for role, column in entry.columns.items():
        if column not in names:
            raise DataError(
                f"{entry.name}: data.columns reads {role} from column {column!r}, which is not there"
                f"{did_you_mean(column, names)}; the columns are {', '.join(names)}."
            )
        if role in names and role not in entry.columns.values():
            raise DataError(
                f"{entry.name}: data.columns reads {role} from column {column!r}, and there is a column {role!r} "
                f"already. Leave that one out with data.ignore_columns: [{role}], or give it another name in "
                "data.columns."
            )
        names[column] = role
    return source.select(names) if list(names.values()) != source.columns else source


def check_ignored(source: Table, entry: DataSource, is_only: bool) -> None:
    """Log a warning for each missing column of `ignore_columns`. It may be a column of the held-out data alone.

    Raises DataError if it seems misspelt: another column has a similar name, and this is the only data.
    """
    for column in entry.ignore_columns:
        if column in source.columns:
            continue
        hint = did_you_mean(column, source.columns)
        columns = ", ".join(source.columns)
        problem = (
            f"{entry.name}: data.ignore_columns names {column!r}, which is not there{hint}; the columns are {columns}."
        )
        if hint and is_only:
            raise DataError(problem)
        logger.warning("%s", problem)


def prompt_columns(template: str | None) -> list[set[str]]:
    """Return the alternative sets of columns for a prompt: the template's columns, or one set per layout."""
    if template is not None:
        return [template_columns(template)]
    return [{"prompt"}, *(set(layout.columns) for layout in LAYOUTS if layout.prompt)]


def template_columns(template: str) -> set[str]:
    """Return the columns that a template names. If it has errors, filling it will find them."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name]
    except ValueError:
        return set()
    return {re.split(r"[.\[]", name)[0] for name in names}


def reward_columns(source: Table, template: str | None) -> list[str]:
    """Return the columns that reward functions can use. Layouts of other systems may add `solution`."""
    layouts = layouts_of(source.columns)
    prompts = [layout.columns[0] for layout in layouts if layout.prompt and template is None]
    names = [name for name in source.columns if name not in ("prompt", *prompts, *MEDIA_COLUMNS)]
    return [*names, "solution"] if layouts and "solution" not in names and has_solutions(source) else names


def has_solutions(source: Table) -> bool:
    """Return whether any row gets a solution from its layout. Unreadable rows are skipped; `check_rows` finds them."""
    for batch in source.batches(range(len(source)), LAYOUT_COLUMNS):
        for row in batch:
            with suppress(DataError):
                if "solution" in read_layout(row, "", with_prompt=False):
                    return True
    return False


def refuse_unread_media(source: Table, config: DataConfig, name: str, used: Collection[str]) -> None:
    """Raise DataError if the model would get no image or video, or if some are in a column that nobody reads.

    `used` are the columns that reward functions name. The message names the columns with values that look like media.
    """
    prompts = [columns for columns in prompt_columns(config.prompt_template) if columns.issubset(source.columns)]
    read = {"id", *MEDIA_COLUMNS, *used, *set().union(*prompts)}
    examples = {column: first_medium(source, column) for column in source.columns if column not in read}
    unread = {column: found for column, found in examples.items() if found is not None}
    holders = {*MEDIA_COLUMNS, *({"path"} if {"path", "data_type"} <= read else ())}.intersection(source.columns)
    has_media = any(is_filled(value) for column in holders for value in source.values(column))
    if unread:
        listed = ", ".join(f"{column} (row {row}: {shown(value)})" for column, (row, value) in unread.items())
        column, (_, value) = next(iter(unread.items()))
        kind = "image" if looks_like_image(value) else "video"
        raise DataError(
            f"{name}: the data has {kind}s that nobody would read, in column {listed}. To give them to the model, set "
            f"data.columns: {{{kind}: {column}}}. To leave them out, set data.ignore_columns: [{', '.join(unread)}]. "
            "A reward function that uses a column declares it as a parameter."
        )
    if not has_media and not config.text_only and not has_draws(config):
        raise DataError(
            f"{name}: no row has an image in column `image` or `images`, or a video in `video` or `videos`, so that a "
            f"vision-language model would see text alone. The columns are {', '.join(source.columns)}. If one of them "
            "holds images, name it with data.columns: {image: its name}. If the data is meant to be text, or if its "
            "images come from tools or an "
            "environment, set data.text_only: true."
        )


def first_medium(source: Table, column: str) -> tuple[int, Any] | None:
    """Return the row and value of the column's first image or video, or None if no value looks like one."""
    return next(((row, value) for row, value in enumerate(source.values(column)) if looks_like_medium(value)), None)


def looks_like_medium(value: Any) -> bool:
    """Return whether a value seems to be an image or a video."""
    return looks_like_image(value) or looks_like_video(value)


def shown(value: Any) -> str:
    """Describe a value that looks like an image or a video, without its content."""
    if isinstance(value, list | tuple):
        return f"a list with {shown(next(filter(looks_like_medium, value)))}"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(str, value))}"
    if isinstance(value, str | Path):
        return "base64 text" if BASE64.match(str(value)) else shorten(repr(str(value)), 80)
    return "pixels" if isinstance(value, Image | np.ndarray) else "an encoded image"
