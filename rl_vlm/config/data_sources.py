"""Entries of `dataset_name` and `eval_dataset_name`, and splits at the end of names (`name@split`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rl_vlm.config.schema import DataConfig, DataSource

Which = Literal["train", "eval"]

NAMES = {"train": "dataset_name", "eval": "eval_dataset_name"}
SPLITS = {"train": "dataset_train_split", "eval": "dataset_test_split"}
OWN_SETTINGS = ("dataset_config", "columns", "ignore_columns", "image_root")
"""Settings that an entry may set for itself. They override the section's."""
SPLIT = re.compile(r"(?P<name>.+)@(?P<split>[^@/]+)")


def is_file(name: str) -> bool:
    """Return whether the data is a file of rows."""
    return name.endswith((".json", ".jsonl", ".parquet"))


def split_name(name: str) -> tuple[str, str | None]:
    """Split `name@split` into its parts. Return the name and None if there is no split, or if the path exists."""
    found = None if is_file(name) or Path(name).exists() else SPLIT.fullmatch(name)
    return (found["name"], found["split"]) if found else (name, None)


def with_split(entry: DataSource) -> DataSource:
    """Move the split at the end of an entry's name to its `split`."""
    name, split = split_name(entry.name)
    return entry if split is None else entry.model_copy(update={"name": name, "split": split})


def data_sources(data: DataConfig, which: Which) -> list[DataSource]:
    """Return the entries. Settings that they leave out, except `split`, come from the section."""
    shared = {
        "dataset_config": data.dataset_config,
        "columns": data.columns,
        "ignore_columns": data.ignore_columns,
        "image_root": data.image_root,
    }

    def of_section(entry: DataSource) -> dict[str, Any]:
        return {name: value for name, value in shared.items() if name not in entry.model_fields_set}

    return [entry.model_copy(update=of_section(entry)) for entry in data.entries(which)]


def is_mixture(data: DataConfig, which: Which) -> bool:
    """Return whether the data are a list of entries."""
    return isinstance(getattr(data, NAMES[which]), list)


def conflicts_of_sources(data: DataConfig) -> Iterator[str]:
    """Yield a message for each conflict between entries of the data, or between entries and settings."""
    listed: list[DataSource] = []
    for which in ("train", "eval"):
        raw, given = getattr(data, NAMES[which]), data.entries(which)
        if raw == []:
            yield f"`{NAMES[which]}` is an empty list; name data, or write null"
        yield from _split_conflicts(data, which)
        yield from _entry_conflicts(given, NAMES[which])
        listed += given
    if any(entry.weight is not None for entry in data.entries("eval")):
        yield "`eval_dataset_name` has a `weight`: of held-out data every row is evaluated once; leave it out"
    for holder in (data, *listed):
        yield from _column_conflicts(holder)
    for name in OWN_SETTINGS:
        if getattr(data, name) and listed and all(getattr(entry, name) for entry in listed):
            yield f"`{name}` has no effect: every entry of the data has its own; leave it out"


def _split_conflicts(data: DataConfig, which: Which) -> Iterator[str]:
    """Yield a message for each name whose split contradicts a setting."""
    given, key, common = getattr(data, NAMES[which]), SPLITS[which], getattr(data, SPLITS[which])
    if isinstance(given, str):
        split = split_name(given)[1]
        if split not in (None, common) and common != type(data).model_fields[key].default:
            yield f"`{NAMES[which]}` {given} ends with another split than `{key}` {common}; keep one of them"
    for entry in given if isinstance(given, list) else []:
        name, own = (entry, None) if isinstance(entry, str) else (entry.name, entry.split)
        if own is not None and split_name(name)[1] not in (None, own):
            yield f"`{NAMES[which]}` has an entry {name} that ends with another split than its `split` {own}; keep one"


def _entry_conflicts(given: list[DataSource], key: str) -> Iterator[str]:
    """Yield a message if only some entries have a weight, and if an entry occurs twice."""
    weights = [entry.weight for entry in given]
    if None in weights and any(weights):
        yield f"`{key}` has entries with and without `weight`; give every entry one, or none"
    same = [(entry.name, entry.dataset_config, entry.split) for entry in given]
    if repeated := sorted({place[0] for place in same if same.count(place) > 1}):
        yield f"`{key}` has {repeated[0]} several times; name it once, with a `weight` to draw it more often"


def _column_conflicts(holder: DataConfig | DataSource) -> Iterator[str]:
    """Yield a message for columns that are named twice."""
    columns = list(holder.columns.values())
    if repeated := sorted({name for name in columns if columns.count(name) > 1}):
        yield f"`columns` reads {repeated[0]} as several columns; name it once"
    if ignored := sorted(set(columns) & set(holder.ignore_columns)):
        yield f"`columns` and `ignore_columns` both name {', '.join(ignored)}; keep one of them"
