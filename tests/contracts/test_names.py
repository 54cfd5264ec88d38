"""One name, one thing: no class of the product has the name of another."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("rl_vlm", "rewards", "launch")


def classes(source: str) -> list[str]:
    """Names of the classes of a module, also of those within functions."""
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def test_classes_within_functions_count():
    assert classes("class A: pass\ndef f():\n    class B(A): pass\n") == ["A", "B"]


def test_no_class_has_the_name_of_another():
    places = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in classes(path.read_text()):
                places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
