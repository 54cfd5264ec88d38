"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields where to write a file, which is then put in the place of `path`. Several processes may do so at once."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    yield unfinished
    os.replace(unfinished, path)
