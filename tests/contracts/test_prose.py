"""Docstrings of functions begin with a verb in its base form: "Return", not "Returns" or "The rows of"."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("rl_vlm", "rewards", "launch", "examples", "benchmarks")
NO_VERBS = set(
    """
    a all an another any as at before behind both by each every first for from how if in inside it its last more most
    no none not nothing of on one only other some that the their there these this those through to two under until
    what when where whether which who whose why with without
    """.split()
)


def is_imperative(docstring: str) -> bool:
    """Whether a docstring seems to begin with a verb in its base form."""
    word = re.split(r"[\s,:;.]", docstring.strip())[0]
    is_plain_word = re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?", word) is not None
    is_base_form = not word.endswith(("s", "ing", "ed")) or word.endswith(("ss", "eed"))
    return is_plain_word and is_base_form and word.lower() not in NO_VERBS


def first_lines() -> list[tuple[str, str]]:
    """Place and docstring of every function but properties and `__init__`, whose docstrings describe a thing."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", docstring)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name != "__init__"
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        and (docstring := ast.get_docstring(node))
    ]


@pytest.mark.parametrize(
    "docstring",
    ["Returns the rows.", "The rows.", "What is left.", "Rows of a table.", "`x` is given.", "Sorted rows."],
)
def test_what_is_no_verb_in_its_base_form(docstring: str):
    assert not is_imperative(docstring)


def test_docstrings_of_functions_begin_with_a_verb():
    lines = first_lines()
    assert len(lines) > 400
    assert [f"{place}: {docstring.splitlines()[0]}" for place, docstring in lines if not is_imperative(docstring)] == []
