"""Objects of the running Python session under names, so that settings can name them like functions of files.

A callable is `python:NAME#DIGEST`. The digest is that of its bytecode and of the values that it holds, so that a
changed function is a changed setting. Rows in memory are a function that returns them, with a digest of their contents.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType
from typing import Any

Function = Callable[..., Any]

PREFIX = "python:"
LIVE: dict[str, Function] = {}
"""The objects that can be loaded now, by name."""


def is_live_name(name: str) -> bool:
    """Return whether a setting names an object of a Python session, of this one or another."""
    return name.startswith(PREFIX) and "#" in name


def live_name(label: str, content: str) -> str:
    """Return the name of an object: `label`, and the first 12 hex digits of the SHA-256 of `content`."""
    return f"{PREFIX}{label}#{hashlib.sha256(content.encode()).hexdigest()[:12]}"


@contextmanager
def live(objects: Mapping[str, Function]) -> Iterator[None]:
    """Let the settings of the block name these objects."""
    before = dict(LIVE)
    LIVE.update(objects)
    try:
        yield
    finally:
        LIVE.clear()
        LIVE.update(before)


def label_of(function: Any) -> str:
    """Return the name of a function, of what a `functools.partial` calls, or of the class of another callable."""
    if isinstance(function, functools.partial):
        return label_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


def content_of(function: Any) -> str:
    """Return a text that is the same for equal callables in two runs of one program.

    It holds the bytecode, defaults and closure of a function, the function and arguments of a `functools.partial`, and
    the methods and values of a class and of its instance. The qualified name stands for what is built in C.
    """
    return _described(function, is_whole=True)


def _described(value: Any, seen: tuple[int, ...] = (), is_whole: bool = False) -> str:
    """Return the text of a value. Objects that are neither data nor functions count by class unless `is_whole`."""
    if isinstance(value, str | int | float | complex | bytes | None):
        return repr(value)
    if id(value) in seen:
        return "recursive"
    inside = functools.partial(_described, seen=(*seen, id(value)))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{inside(key)}: {inside(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple | set | frozenset):
        items = map(inside, value)
        return f"{type(value).__name__}({', '.join(items if isinstance(value, list | tuple) else sorted(items))})"
    if isinstance(value, CodeType):  # without file, lines and name, which say nothing about what it does
        return inside((value.co_code, value.co_names, value.co_varnames, value.co_consts))
    if isinstance(value, functools.partial):
        return inside((value.func, value.args, value.keywords))
    if inspect.ismethod(value):
        return f"{inside(value.__func__)} {inside(value.__self__, is_whole=True)}"
    if isinstance(value, staticmethod | classmethod):
        return inside(value.__func__)
    if isinstance(value, FunctionType):
        return inside((value.__code__, value.__defaults__, value.__kwdefaults__, _closure(value)))
    if hasattr(value, "__wrapped__"):  # by functools.lru_cache
        return inside(value.__wrapped__)
    place = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    name = f"{place.__module__}.{place.__qualname__}"
    if not is_whole or not isinstance(place, type):
        return name
    own = {} if place is value else getattr(value, "__dict__", {})
    return f"{name} {inside(_class_values(place))} {inside(own)}"


def _closure(function: FunctionType) -> dict[str, Any]:
    """Return the values of the closure by name, without variables that have none."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def _class_values(place: type) -> list[tuple[str, Any]]:
    """Return methods and values of a class and of its base classes, but for values that Python gives each class."""
    bases = [base for base in place.__mro__ if base is not object]
    found = [(name, value) for base in bases for name, value in vars(base).items()]
    return [(name, value) for name, value in found if inspect.isroutine(value) or not name.startswith("__")]
