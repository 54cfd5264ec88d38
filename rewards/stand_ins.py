"""Stand-ins for modules of ms-swift. Its users' reward files import their base class from them.

A plugin of ms-swift begins with `from swift.plugin import ORM, orms`, or `from swift.rewards import …`, and may import
its logger from `swift.utils`. It needs only these names, so it loads without ms-swift.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

MODULES = ("swift", "swift.plugin", "swift.plugin.orm", "swift.rewards", "swift.rewards.orm", "swift.utils")


class ORM:
    """The base class of ms-swift's reward functions."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError


class AsyncORM(ORM):
    """The base class of its async reward functions."""


orms: dict[str, type[ORM]] = {}
"""Plugins register their classes here. Nothing reads it, since this project names functions by file and class."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Make the stand-ins importable in the block, unless ms-swift is installed or the file has its own `swift`."""
    if "swift" in sys.modules or importlib.util.find_spec("swift") is not None:
        yield
        return
    for name in MODULES:
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(ORM=ORM, AsyncORM=AsyncORM, orms=orms, get_logger=logging.getLogger, __path__=[])
    try:
        yield
    finally:
        for name in MODULES:
            del sys.modules[name]
