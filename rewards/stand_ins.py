"""Stand-ins for modules of ms-swift. Its users' reward files import their base class from them.

A plugin of ms-swift begins with `from swift.plugin import ORM, orms`, or `from swift.rewards import …`, and may import
its logger from `swift.utils`. Plugins often copy further imports that their reward functions do not need. Each further
name of `swift` is a class that cannot be used, so a plugin loads without ms-swift.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REGISTRY = "orms"
"""Name of the dict in which plugins register their classes."""


class ORM:
    """The base class of ms-swift's reward functions."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError


class AsyncORM(ORM):
    """The base class of its async reward functions."""


class Missing(type):
    """The class of each name of ms-swift that has no stand-in. Items can be set, since it may be a registry."""

    place: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{cls.place} is a part of ms-swift that rl-vlm does not have")

    def __setitem__(cls, key: str, value: Any) -> None:
        """Accept a registration, which nothing reads."""


class StandIns(MetaPathFinder, Loader):
    """Finds `swift` and all of its modules while a file is loaded."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        """Full names that the file imported and that have no stand-in."""
        self.names = {"ORM": ORM, "AsyncORM": AsyncORM, "get_logger": logging.getLogger, REGISTRY: {}}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module of ms-swift, or None for others."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "swift" else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module."""

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            place = f"{module.__name__}.{name}"
            self.missing.append(place)
            vars(module)[name] = Missing(name, (), {"place": place})
            return vars(module)[name]

        vars(module).update(self.names, __getattr__=missing)


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """Make the stand-ins importable in the block, unless ms-swift is installed or the file has its own `swift`.

    Yields the list of the names that files imported and that have no stand-in.
    """
    if "swift" in sys.modules or importlib.util.find_spec("swift") is not None:
        yield []
        return
    finder = StandIns()
    sys.meta_path.append(finder)
    try:
        yield finder.missing
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
            del sys.modules[name]
