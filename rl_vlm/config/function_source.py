"""The source of a user's function, read without importing it.

    file.py:function ─ its statement ─ statements of the names that it uses ─► attributes that they read, digest

Names lead to other statements of the file, and through imports to files of its folder or package, and of rl_vlm. Other
packages are not opened.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_vlm.config.function_names import is_live_name

PACKAGE = Path(__file__).parents[1]
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""


@dataclass(frozen=True)
class FunctionSource:
    """The source of a function and of the code in its folder or package that it uses."""

    attributes: frozenset[str]
    """Names of the attributes that it reads: `epsilon` of `algorithm.epsilon` or `getattr(algorithm, "epsilon")`."""
    digest: str
    """Digest of the code without comments, docstrings and annotations."""
    reads_first_message: bool = False
    """Whether a reward function reads the first message of a completion, as `completion[0]`."""


def read_source(name: str) -> FunctionSource | None:
    """Read the source of `file.py:function` or `module:function`. Returns None if there is no source to read."""
    if is_live_name(name):
        return None
    module, _, function = name.rpartition(":")
    path = Path(module).resolve() if module.endswith(".py") else module_file(module, Path.cwd())
    if path is None or not path.is_file():
        return None
    is_file, depth = module.endswith(".py"), module.count(".")
    reader = _Reader(path.parent if is_file else path.parents[max(0, depth - 1)])
    reader.visit(path, function if function in reader.definitions(path) else function.partition(".")[0])
    found = list(reader.found.values())
    if not found:
        return None
    attributes = frozenset(attribute for statement in found for attribute in _attributes(statement))
    code = "\n".join(sorted(map(ast.dump, found)))
    reads_first = any(map(_reads_first_message, found))
    return FunctionSource(attributes, hashlib.sha256(code.encode()).hexdigest()[:12], reads_first)


class _Reader:
    """Collects the statements that define a function and the names that it uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[tuple[Path, str], ast.AST] = {}
        self.seen: set[tuple[Path, str]] = set()
        self.files: dict[Path, dict[str, ast.stmt]] = {}

    def visit(self, path: Path, name: str) -> None:
        """Collect the statement that defines a name in a file, and the statements that it uses."""
        statement = self.definitions(path).get(name)
        if statement is None or (path, name) in self.seen:
            return
        self.seen.add((path, name))
        if isinstance(statement, ast.ImportFrom):
            original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
            self.follow(path, statement.module or "", original, statement.level)
        elif not isinstance(statement, ast.Import):
            self.found[path, name] = _Bare().visit(statement)
            for node in ast.walk(statement):
                self.visit_used(path, node)

    def visit_used(self, path: Path, node: ast.AST) -> None:
        """Collect the definition that a node uses: a name of its file, or an attribute of an imported module."""
        if isinstance(node, ast.Name):
            self.visit(path, node.id)
        elif isinstance(node, ast.Attribute):
            for module in self.modules(path, ast.unparse(node.value)):
                self.follow(path, module, node.attr)

    def modules(self, path: Path, name: str) -> Iterator[str]:
        """Yield the modules that a dotted name of a file can stand for."""
        for statement in self.definitions(path).values():
            if isinstance(statement, ast.Import | ast.ImportFrom):
                package = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
                yield from (package + a.name for a in statement.names if (a.asname or a.name) == name)

    def follow(self, path: Path, module: str, name: str, level: int = 0) -> None:
        """Collect a name of an imported module if its file is in the folder or in rl_vlm.

        Skip installed packages: the folder may contain an environment.
        """
        beside = path.parents[level - 1] if level else path.parent
        found = _file_below(beside, module) or (None if level else module_file(module, self.folder))
        own = next((place for place in (self.folder, PACKAGE) if found and place in found.parents), None)
        if found and own and INSTALLED.isdisjoint(found.relative_to(own).parts):
            self.visit(found, name)

    def definitions(self, path: Path) -> dict[str, ast.stmt]:
        """Return the statements of a file by the names that they define. A file that is not Python has none."""
        if path not in self.files:
            try:
                statements = ast.parse(path.read_text(encoding="utf-8")).body
            except (OSError, ValueError, SyntaxError):
                statements = []
            self.files[path] = {name: s for s in _statements(statements) for name in _defined(s)}
        return self.files[path]


def module_file(module: str, folder: Path) -> Path | None:
    """Find the file of a module as an import would, or else below the folder. Imports no package."""
    if not all(map(str.isidentifier, module.split("."))):
        return None
    name, spec, places = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = next(filter(None, (finder.find_spec(name, places) for finder in sys.meta_path)), None)
        if spec is None:
            return _file_below(folder, module)
        places = spec.submodule_search_locations or []
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _file_below(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those within `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            handlers = [handler.body for handler in getattr(statement, "handlers", [])]
            for block in (*blocks, *handlers):
                yield from _statements(block)


def _defined(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        yield from (key for target in targets for key in _registered(target))


def _registered(target: ast.expr) -> Iterator[str]:
    """Yield the name under which a statement such as `orms["name"] = Class` registers a function."""
    match target:
        case ast.Subscript(value=ast.Name(), slice=ast.Constant(value=str(key))):
            yield key


def _attributes(statement: ast.AST) -> Iterator[str]:
    """Yield the names of attributes that a statement reads."""
    for node in ast.walk(statement):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name


def _reads_first_message(statement: ast.AST) -> bool:
    """Return whether a statement reads `completions[i][0]`, or index 0 of a name that stands for a completion."""
    names = {"completion"}
    for node in ast.walk(statement):
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            names |= set(_completions_in(node.target, node.iter))
    for node in ast.walk(statement):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=0)) if name in names:
                return True
            case ast.Subscript(value=ast.Subscript(value=ast.Name(id="completions")), slice=ast.Constant(value=0)):
                return True
    return False


def _completions_in(target: ast.expr, values: ast.expr) -> Iterator[str]:
    """Yield the names of a loop that stand for completions: over `completions`, and in `zip` and `enumerate`."""
    match target, values:
        case ast.Name(id=name), ast.Name(id="completions"):
            yield name
        case ast.Tuple(elts=[_, inner]), ast.Call(func=ast.Name(id="enumerate"), args=[counted, *_]):
            yield from _completions_in(inner, counted)
        case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=zipped):
            for part, each in zip(parts, zipped, strict=False):
                yield from _completions_in(part, each)


class _Bare(ast.NodeTransformer):
    """Removes docstrings and annotations, which do not change the behavior of the code."""

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.body, node.returns = _without_docstring(node.body), None
            case ast.ClassDef():
                node.body = _without_docstring(node.body)
            case ast.arg():
                node.annotation = None
            case ast.AnnAssign():
                node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    has_one = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1:] if has_one else body
