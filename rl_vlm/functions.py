"""Loading of users' functions: `file.py:function`, `module:function`, or an entry point of an installed package.

A static method is `file.py:Class.method`.

Objects of the running Python session can be named like functions of files. A callable's name has a digest of its
bytecode and of the values that it holds, so that a changed function is a changed setting. Rows in memory are named as a
function that returns them, with a digest of their contents.

Modules are also imported from the working directory, as under `python -m`. It is searched last, so its files shadow no
package. While a file is loaded, modules of its folder can be imported too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, suppress
from importlib.metadata import entry_points
from inspect import Parameter
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rl_vlm.config.function_names import is_live_name
from rl_vlm.errors import RLVLMError, did_you_mean, listed, text_of

Function = Callable[..., Any]

LIVE: dict[str, Function] = {}
"""Objects of the session that settings can name now, by name."""
NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class LoadError(RLVLMError):
    """A function that cannot be loaded. The message says which source was tried, and why it failed."""


def load_function(
    name: str, built_ins: Mapping[str, Function] = {}, group: str | None = None, registry: str | None = None
) -> Function:
    """Load `file.py:function` or `module:function`, or a name in `built_ins` or in the entry-point group `group`.

    Modules are also searched for in the working directory. `registry` is the name of a dict in which a module may
    register functions. Raises LoadError if the function cannot be loaded.
    """
    if is_live_name(name):
        return _load_live(name)
    source, colon, attribute = name.rpartition(":")
    if not colon:
        return _load_named(name, built_ins, group)
    search_working_directory()
    with chdir("."):  # an import may change the working directory
        module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    registered = getattr(module, registry, None) if registry else None
    registered = registered if isinstance(registered, Mapping) else {}
    function = _attribute(module, attribute)
    function = registered.get(attribute) if function is None else function
    if callable(function):
        return function
    found = "has no function" if function is None else f"has a {type(function).__name__}, not a function, called"
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    own += [key for key in registered if key not in own]
    raise LoadError(f"{module.__file__} {found} {attribute!r}{did_you_mean(attribute, own)}; it defines: {listed(own)}")


def search_working_directory() -> None:
    """Search the working directory for modules, after all packages."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _attribute(module: ModuleType, path: str) -> Any:
    """Return the object at a dotted path in a module, or None. Raises LoadError if it is a method of instances."""
    owner, found = None, module
    for name in path.split("."):
        owner, found = found, getattr(found, name, None)
    if isinstance(owner, type) and isinstance(inspect.getattr_static(owner, name, None), FunctionType):
        raise LoadError(
            f"{module.__file__}: {path} is called on an instance of {owner.__name__}: make it a `@staticmethod`, or "
            f"name an instance's method, such as `my_function = {owner.__name__}().{name}` in the same file"
        )
    return found


def load_callable(
    name: str, built_ins: Mapping[str, Function] = {}, group: str | None = None, registry: str | None = None
) -> Function:
    """Load a function as `load_function` does. A class is constructed without arguments, for its `__call__`.

    Raises LoadError if the function cannot be loaded or the class cannot be constructed.
    """
    found = load_function(name, built_ins, group, registry)
    if not isinstance(found, type):
        return found
    if not any("__call__" in vars(base) for base in found.__mro__):
        raise LoadError(f"the class {found.__name__!r} has no method `__call__`, which a function needs")
    needed = [p.name for p in inspect.signature(found).parameters.values() if p.default is p.empty and p.kind in NAMED]
    if needed:
        raise LoadError(
            f"the class {found.__name__!r} is constructed without arguments, but needs {listed(needed)}; give them "
            f"defaults, or name an instance, such as `my_function = {found.__name__}(…)` in the same file"
        )
    with _load_errors(f"the class {found.__name__!r} cannot be constructed"):
        return found()


def _load_live(name: str) -> Function:
    if name not in LIVE:
        raise LoadError(
            f"{name} was an object in the memory of a Python session and is not in this process: run the Python code "
            "again that gives it to GRPOTrainer. Or write it to a file, and name `file.py:function` or the file of rows"
        )
    return LIVE[name]


def _load_named(name: str, built_ins: Mapping[str, Function], group: str | None) -> Function:
    if name in built_ins:
        return built_ins[name]
    plugins = {plugin.name: plugin for plugin in entry_points(group=group)} if group else {}
    if name not in plugins:
        raise LoadError(
            f"no built-in or installed function is called {name!r}{did_you_mean(name, [*built_ins, *plugins])}; "
            f"built-in: {listed(built_ins)}; entry points of the group {group}: {listed(plugins)}; "
            "name your own function as `file.py:function` or `module:function`"
        )
    with _load_errors(f"the entry point {plugins[name].value!r} cannot be imported"):
        return plugins[name].load()


def _load_module(name: str) -> ModuleType:
    with _load_errors(f"the module {name!r} cannot be imported from {Path.cwd()}"):
        return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    """Load a file as a module. Its name is its path, so that a file called rewards.py does not replace a package."""
    path = path.resolve()
    if str(path) in sys.modules:
        return sys.modules[str(path)]
    if not path.is_file():
        beside = sorted(file.name for file in path.parent.glob("*.py"))
        hint = did_you_mean(path.name, beside)
        raise LoadError(f"there is no file {path}{hint}; Python files there: {listed(beside)}")
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec and spec.loader, "the name ends in .py"
    module = sys.modules[str(path)] = importlib.util.module_from_spec(spec)
    try:
        with _load_errors(f"{path} cannot be imported"), _importable_from(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
    return module


@contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    """Make modules of the folder importable inside."""
    added = str(folder) not in sys.path
    if added:
        sys.path.append(str(folder))
    try:
        yield
    finally:
        if added:
            sys.path.remove(str(folder))


@contextmanager
def _load_errors(problem: str) -> Iterator[None]:
    """Turn every error of the block but Ctrl-C into a LoadError. Its message begins with `problem`."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise LoadError(f"{problem}: {type(error).__name__}: {text_of(error)}") from error


@contextmanager
def live(objects: Mapping[str, Function]) -> Iterator[None]:
    """Let settings name these objects within the block."""
    before = dict(LIVE)
    LIVE.update(objects)
    try:
        yield
    finally:
        LIVE.clear()
        LIVE.update(before)


def label_of(function: Any) -> str:
    """Return the name of a function. For a `functools.partial` name its function, for other callables their class."""
    if isinstance(function, functools.partial):
        return label_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


def content_of(function: Any) -> str:
    """Return a text that is the same for equal callables in two runs of one program.

    It holds the bytecode, defaults and closure of a function, the function and arguments of a `functools.partial`, and
    the methods and values of a class and of its instance. Callables that are built in C count by qualified name.
    """
    return _described(function, is_whole=True)


def _described(value: Any, seen: tuple[int, ...] = (), is_whole: bool = False) -> str:
    """Return the text of a value. Unless `is_whole`, objects other than data and functions count by class."""
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
    if isinstance(value, CodeType):  # without file, lines and name, which do not change its effect
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
    name = f"{getattr(place, '__module__', 'builtins')}.{place.__qualname__}"
    if not is_whole or not isinstance(place, type):
        return name
    own = {} if place is value else getattr(value, "__dict__", {})
    return f"{name} {inside(_class_values(place))} {inside(own)}"


def _closure(function: FunctionType) -> dict[str, Any]:
    """Return the closure's values by name, without variables that have no value yet."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def _class_values(place: type) -> list[tuple[str, Any]]:
    """Return methods and values of a class and its base classes, without the values that Python gives each class."""
    bases = [base for base in place.__mro__ if base is not object]
    found = [(name, value) for base in bases for name, value in vars(base).items()]
    return [(name, value) for name, value in found if inspect.isroutine(value) or not name.startswith("__")]
