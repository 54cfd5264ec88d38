"""From the name of a reward function in a config to the function."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from rewards.contract import RewardFunction
from rewards.registry import BUILT_INS

ENTRY_POINT_GROUP = "rl_vlm.rewards"


class LoadError(Exception):
    """A reward function that cannot be loaded; the message says what was tried, what must be there, and what is."""


def load_function(name: str) -> RewardFunction:
    """Loads a built-in or entry point by name, or `module:function`, or `file.py:function`.

    Modules and files are looked for from the working directory as well. Raises LoadError.
    """
    source, colon, attribute = name.rpartition(":")
    if not colon:
        return _load_named(name)
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    function = getattr(module, attribute, None)
    if callable(function):
        return function
    found = "has no function" if function is None else f"has a {type(function).__name__}, not a function, called"
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    raise LoadError(f"{module.__file__} {found} {attribute!r}{suggest(attribute, own)}; it defines: {listed(own)}")


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint at the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listed(names: Iterable[str]) -> str:
    """Names in order, for an error message."""
    return ", ".join(sorted(names)) or "none"


def _load_named(name: str) -> RewardFunction:
    if name in BUILT_INS:
        return BUILT_INS[name]
    plugins = {plugin.name: plugin for plugin in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in plugins:
        raise LoadError(
            f"no built-in or installed reward function is called {name!r}{suggest(name, [*BUILT_INS, *plugins])}; "
            f"built-in: {listed(BUILT_INS)}; entry points of the group {ENTRY_POINT_GROUP}: {listed(plugins)}; "
            "a function of your own is named `file.py:function` or `module:function`"
        )
    try:
        return plugins[name].load()
    except Exception as error:
        raise LoadError(f"the entry point {plugins[name].value!r} cannot be imported: {_cause(error)}") from error


def _load_module(name: str) -> ModuleType:
    with _importable_from(Path.cwd()):
        try:
            return importlib.import_module(name)
        except Exception as error:
            raise LoadError(f"the module {name!r} cannot be imported from {Path.cwd()}: {_cause(error)}") from error


def _load_file(path: Path) -> ModuleType:
    """Runs a file as a module. Its name is its path: a file called rewards.py must not replace this package."""
    path = path.resolve()
    if str(path) in sys.modules:
        return sys.modules[str(path)]
    if not path.is_file():
        beside = sorted(file.name for file in path.parent.glob("*.py"))
        raise LoadError(f"there is no file {path}{suggest(path.name, beside)}; Python files there: {listed(beside)}")
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec and spec.loader, "the name ends in .py"
    module = sys.modules[str(path)] = importlib.util.module_from_spec(spec)
    try:
        with _importable_from(path.parent):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[str(path)]
        raise LoadError(f"{path} cannot be imported: {_cause(error)}") from error
    return module


@contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    """Inside, modules of the folder can be imported. Not for good: its files could shadow packages imported later."""
    added = str(folder) not in sys.path
    if added:
        sys.path.append(str(folder))
    try:
        yield
    finally:
        if added:
            sys.path.remove(str(folder))


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
