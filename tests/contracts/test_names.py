"""One name, one thing: no class or type of the product has the name of another."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("rl_vlm", "rewards", "launch")


def definitions(source: str) -> list[tuple[str, str]]:
    """Names of the classes of a module, also within functions, and of its types, each with what the type stands for."""
    tree = ast.parse(source)
    found = [(node.name, "class") for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_type_name(name):
                found.append((name, ast.unparse(value)))
    return found


def is_type_name(name: str) -> bool:
    """Return whether a name is written as types are, such as `TableRow`."""
    return name[0].isupper() and not name.isupper()


def test_classes_within_functions_and_types_count():
    source = "class A: pass\nPLACES = 3\nRow = dict[str, int]\ndef f():\n    class B(A): pass\n    Local = 1\n"
    assert definitions(source) == [("A", "class"), ("B", "class"), ("Row", "dict[str, int]")]


def test_no_class_or_type_has_the_name_of_another():
    """Types that two modules write alike, such as `dict[str, Any]` for a message, are one thing."""
    places, meanings = defaultdict(list), defaultdict(set)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name, meaning in definitions(path.read_text()):
                places[name].append(str(path.relative_to(ROOT)))
                meanings[name].add(meaning)
    assert len(places) > 250
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert {
        name: found for name, found in repeated.items() if meanings[name] == {"class"} or len(meanings[name]) > 1
    } == {}
