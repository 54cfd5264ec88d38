"""Names of data: kinds of data, and splits at the end of names (`name@split`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

Which = Literal["train", "eval"]
SPLIT = re.compile(r"(?P<name>.+)@(?P<split>[^@/]+)")


def is_file(name: str) -> bool:
    """Return whether the data is a file of rows."""
    return name.endswith((".json", ".jsonl", ".parquet"))


def num_draws(name: str) -> int | None:
    """Return N for `draws:N`, N rows without content whose environments make the tasks, or None for other names."""
    found = re.fullmatch(r"draws:([1-9]\d*)", name)
    return int(found[1]) if found else None


def split_name(name: str) -> tuple[str, str | None]:
    """Split `name@split` into its parts. Return the name and None if there is no split, or if the path exists."""
    found = None if is_file(name) or Path(name).exists() else SPLIT.fullmatch(name)
    return (found["name"], found["split"]) if found else (name, None)
