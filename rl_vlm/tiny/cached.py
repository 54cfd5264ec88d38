"""Models that are made by a function, kept between runs."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.metadata import version
from inspect import getfile
from pathlib import Path
from types import ModuleType

MakeModel = Callable[[Path, int], None]
"""Writes a checkpoint into a new directory, from a seed."""
logger = logging.getLogger(__name__)


def cached_model(*modules: ModuleType) -> Callable[[MakeModel], MakeModel]:
    """Return a decorator of functions that make a model. Each model is then made once for a user.

    Models are kept in `$XDG_CACHE_HOME/rl_vlm/models`, by default `~/.cache/rl_vlm/models`. A model is made again if
    the seed, the function's file, a file of `modules` or of rl_vlm, or a version of torch or transformers changes. If
    the cache cannot be written, the model is made where it is asked for.
    """

    def decorate(make: MakeModel) -> MakeModel:
        @wraps(make)
        def cached(directory: Path, seed: int) -> None:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rl_vlm" / "models"
            kept = folder / digest(make, modules, seed)
            try:
                if not kept.is_dir():
                    make_beside(kept, make, seed)
            except OSError as error:
                logger.warning("the starting model is not kept for later runs: %s", error)
                make(directory, seed)
            else:
                shutil.copytree(kept, directory, dirs_exist_ok=True)

        return cached

    return decorate


def make_beside(kept: Path, make: MakeModel, seed: int) -> None:
    """Make a model in a temporary directory, and move it to its place, unless another process was faster."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / "model"
        make(made, seed)
        if not kept.exists():
            made.rename(kept)


def digest(make: MakeModel, modules: Sequence[ModuleType], seed: int) -> str:
    """Return a hash of everything that the model depends on."""
    found = hashlib.sha256(f"{make.__qualname__} {seed} {version('torch')} {version('transformers')}".encode())
    files = [getfile(read) for read in (make, *modules)]
    for file in [*files, *sorted(Path(__file__).parents[1].rglob("*.py"))]:
        found.update(Path(file).read_bytes())
    return found.hexdigest()[:32]
