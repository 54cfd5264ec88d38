"""Which module may import which: one table of layers, and where heavy packages may appear."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MATHS = ROOT / "rl_vlm" / "algorithm"
OURS = ("rl_vlm", "rewards", "launch")

LAYERS = [
    "errors types stages",
    "config",
    "functions distributed",
    "data model algorithm reward checkpoint",
    "log",
    "passes tiny",
    "rollout",
    "evaluation trainer",
    "plan",
    "run",
    "tools",
    "grpo_trainer",
]
"""Modules and packages of `rl_vlm`, lowest first. A module imports from lower layers and its own package only, so that
the stages of a batch, which are one layer, do not import each other."""

LAYER_OF = {f"rl_vlm.{name}": i for i, layer in enumerate(LAYERS) for name in layer.split()}

ONLY_IN = {
    "rewards": (
        "rl_vlm/errors.py",
        "rl_vlm/reward/",
        "rl_vlm/rollout/",
        "rl_vlm/tools/checks/",
        "rl_vlm/data/video/process.py",
    ),
    "accelerate": ("rl_vlm/distributed/",),
    "peft": ("rl_vlm/model/",),
    "trl": (),
    "vllm": ("rl_vlm/rollout/vllm/",),
    "deepspeed": ("rl_vlm/distributed/",),
}
"""Folders of the files that may import a package, inside of functions or not."""

LOCAL = {
    "transformers", "accelerate", "peft", "datasets", "trl", "matplotlib", "bitsandbytes", "deepspeed", "sklearn",
}  # fmt: skip
"""Packages that are imported where they are used, never at the top of a file."""


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name."""

    file: str
    line: int
    module: str
    at_top: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def code_files() -> list[Path]:
    return [path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]


def imports_of(path: Path) -> Iterator[Import]:
    """Imports that run; those for type checkers alone do not."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    in_functions = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in for_types:
            for module in imported_modules(node):
                yield Import(str(path.relative_to(ROOT)), node.lineno, module, id(node) not in in_functions)


def imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """`from rl_vlm import errors` names a module behind `import`; `from rl_vlm.errors import DataError` before it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.module and not node.level, "imports are absolute"
    return [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "rl_vlm" else [node.module]


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for path in code_files() for found in imports_of(path))


def component(module: str) -> str:
    """`rl_vlm.config.load` -> `rl_vlm.config`"""
    return ".".join(module.split(".")[:2])


def owner(found: Import) -> str:
    """The component that holds the import."""
    return component(found.file.removesuffix(".py").replace("/", "."))


def package(found: Import) -> str:
    return found.module.partition(".")[0]


def test_every_module_has_a_layer():
    components = {
        component(".".join(p.relative_to(ROOT).with_suffix("").parts)) for p in (ROOT / "rl_vlm").rglob("*.py")
    }
    assert components - {"rl_vlm.__init__"} == set(LAYER_OF)


def test_modules_import_lower_layers_only():
    ours = [found for found in all_imports() if package(found) == "rl_vlm" and owner(found) in LAYER_OF]
    assert len(ours) > 50
    upward = [
        str(found)
        for found in ours
        if component(found.module) != owner(found)
        and LAYER_OF.get(component(found.module), len(LAYERS)) >= LAYER_OF[owner(found)]
    ]
    assert upward == []


def test_the_layers_are_those_that_contributors_read():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    block = guide.partition(f"    ```\n    {LAYERS[0]}\n")[2].partition("    ```\n")[0]
    assert [LAYERS[0], *(line.strip() for line in block.splitlines())] == LAYERS


@pytest.mark.parametrize(("name", "allowed"), ONLY_IN.items())
def test_packages_are_imported_in_these_folders(name: str, allowed: tuple[str, ...]):
    files = {found.file for found in all_imports() if found.file.startswith("rl_vlm/") and package(found) == name}
    assert bool(files) == bool(allowed)
    assert [file for file in files if not file.startswith(allowed)] == []


def test_files_check_that_rewards_are_ours_before_they_import_them():
    """Else a user's own `rewards.py` would run. An import of `rl_vlm.reward` is the check, which is in `errors.py`.

    The data does not import rewards. Decoders of videos call the check themselves.
    """
    have_it = ("rewards/", "rl_vlm/reward/", "rl_vlm/errors.py", "rl_vlm/data/video/process.py")
    unchecked = []
    for file in sorted({found.file for found in all_imports() if not found.file.startswith(have_it)}):
        packages = [f"{folder}/__init__.py" for folder in reversed(Path(file).parents)]
        in_order = [found for name in (*packages, file) for found in all_imports() if found.file == name]
        checks = [i for i, found in enumerate(in_order) if component(found.module) == "rl_vlm.reward"]
        unchecked += [str(found) for found in in_order[: min(checks, default=None)] if package(found) == "rewards"]
    assert unchecked == []


def test_rewards_import_nothing_of_ours_and_nothing_imports_launch():
    from_rewards = [
        str(f) for f in all_imports() if f.file.startswith("rewards/") and package(f) in ("rl_vlm", "launch")
    ]
    of_launch = [str(f) for f in all_imports() if not f.file.startswith("launch/") and package(f) == "launch"]
    assert (from_rewards, of_launch) == ([], [])


def test_heavy_packages_are_imported_inside_functions():
    assert [str(found) for found in all_imports() if found.at_top and package(found) in LOCAL] == []


@pytest.mark.parametrize(
    "name", ["types", "passes/micro_batches", *(f"algorithm/{path.stem}" for path in MATHS.glob("[!_]*.py"))]
)
def test_the_maths_needs_torch_and_jaxtyping_alone(name: str):
    modules = {found.module for found in all_imports() if found.file == f"rl_vlm/{name}.py"}
    foreign = {module for module in modules if module.partition(".")[0] not in sys.stdlib_module_names}
    ours = "types config errors functions names stages algorithm".split()
    allowed = ("torch", "numpy", "jaxtyping", *(f"rl_vlm.{name}" for name in ours))
    assert [module for module in foreign if not module.startswith(allowed)] == []


def test_help_and_config_errors_need_no_torch():
    torch_free = ("rewards/", "launch/", "rl_vlm/config/", "rl_vlm/errors.py")
    files = [path.relative_to(ROOT) for path in code_files() if str(path.relative_to(ROOT)).startswith(torch_free)]
    modules = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert "launch.cli" in modules and "rl_vlm.config.load" in modules
    program = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_the_package_imports_its_public_names_when_they_are_used():
    assert [str(found) for found in all_imports() if found.file == "rl_vlm/__init__.py" and found.at_top] == [
        "rl_vlm/__init__.py:3 imports typing"
    ]


def test_no_two_files_import_each_other_in_a_circle():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in code_files()}
    graph: dict[str, set[str]] = {name: set() for name in files}
    for found in all_imports():
        graph[".".join(Path(found.file).with_suffix("").parts)] |= {found.module} & files.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError, with the files
