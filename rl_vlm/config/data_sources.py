"""Entries of `dataset_name` and `eval_dataset_name`."""

from __future__ import annotations

from typing import Any

from rl_vlm.config.data_names import Which, is_file, num_draws, split_name
from rl_vlm.config.sections import DataConfig, DataSource

NAMES = {"train": "dataset_name", "eval": "eval_dataset_name"}
SPLITS = {"train": "dataset_train_split", "eval": "dataset_test_split"}
OWN_SETTINGS = ("dataset_config", "columns", "ignore_columns", "image_root", "video_root")
"""Settings that an entry may set for itself. They override the section's."""


def has_draws(data: DataConfig) -> bool:
    """Return whether environments make the tasks of some rows."""
    return any(num_draws(entry.name) is not None for entry in all_entries(data))


def data_sources(data: DataConfig, which: Which) -> list[DataSource]:
    """Return the entries. Settings that they leave out, except `split`, come from the section."""
    shared = {
        "dataset_config": data.dataset_config,
        "columns": data.columns,
        "ignore_columns": data.ignore_columns,
        "image_root": data.image_root,
        "video_root": data.video_root,
    }

    def of_section(entry: DataSource) -> dict[str, Any]:
        return {name: value for name, value in shared.items() if name not in entry.model_fields_set}

    return [entry.model_copy(update=of_section(entry)) for entry in data.entries(which)]


def is_mixture(data: DataConfig, which: Which) -> bool:
    """Return whether the data are a list of entries."""
    return isinstance(getattr(data, NAMES[which]), list)


def all_entries(data: DataConfig) -> list[DataSource]:
    """Return the entries of the training and the held-out data."""
    return [*data.entries("train"), *data.entries("eval")]


def reads_no_split(data: DataConfig, which: Which) -> bool:
    """Return whether data is given but ignores the section's split: each entry is a file or has its own split."""
    given = data.entries(which)
    return bool(given) and all(
        is_file(entry.name) or (entry.split is not None and is_mixture(data, which)) for entry in given
    )


def reads_no_config(entry: DataSource) -> bool:
    """Return whether an entry ignores the section's `dataset_config`."""
    return entry.dataset_config is not None or is_file(entry.name) or ":" in entry.name


def has_other_split(data: DataConfig, which: Which) -> bool:
    """Return whether the data are one name that ends with another split than the section's."""
    given = getattr(data, NAMES[which])
    split = data.dataset_train_split if which == "train" else data.dataset_test_split
    return isinstance(given, str) and split_name(given)[1] not in (None, split)


def with_two_splits(data: DataConfig, which: Which) -> list[dict[str, Any]]:
    """Return name and split of the entries whose names end with another split."""
    given = getattr(data, NAMES[which])
    mappings = [entry for entry in given if not isinstance(entry, str)] if isinstance(given, list) else []
    return [
        {"name": entry.name, "split": entry.split}
        for entry in mappings
        if entry.split is not None and split_name(entry.name)[1] not in (None, entry.split)
    ]


def repeated_entry(data: DataConfig, which: Which) -> list[dict[str, Any]]:
    """Return the name of the first entry that occurs several times."""
    same = [(entry.name, entry.dataset_config, entry.split) for entry in data.entries(which)]
    return [{"name": name} for name in sorted({place[0] for place in same if same.count(place) > 1})[:1]]


def all_entries_have(data: DataConfig, name: str) -> bool:
    """Return whether there are entries, and all of them have their own value of a setting."""
    entries = all_entries(data)
    return bool(entries) and all(getattr(entry, name) for entry in entries)


def repeated_columns(data: DataConfig) -> list[dict[str, Any]]:
    """Return the first column that the section, or an entry, reads under several names."""
    columns = [list(holder.columns.values()) for holder in (data, *all_entries(data))]
    return [{"name": min(twice)} for read in columns if (twice := {name for name in read if read.count(name) > 1})]


def ignored_columns(data: DataConfig) -> list[dict[str, Any]]:
    """Return the columns that the section, or an entry, both renames and ignores."""
    both = [{*holder.columns.values()} & {*holder.ignore_columns} for holder in (data, *all_entries(data))]
    return [{"columns": ", ".join(sorted(columns))} for columns in both if columns]
