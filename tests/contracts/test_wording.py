"""A message of the product is written out in one test file. Tests of other files look for the things that it names."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT

PACKAGES = ("rl_vlm", "rewards", "launch")
WORDS = 8
"""Number of successive words that two test files may not share. Shorter texts are names."""
VALUE = "\0"
"""Stands for a value in a formatted text."""


def texts(source: str) -> Iterator[str]:
    """Yield the texts of a module, without docstrings."""
    others = set()  # docstrings, and parts of formatted texts: parents are walked before them
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            others.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            others.update(node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in others:
            yield node.value


def phrases(text: str) -> Iterator[str]:
    """Yield all runs of `WORDS` words. A value ends a run."""
    for part in text.split(VALUE):
        words = re.findall(r"\w+", part.lower())
        for start in range(len(words) - WORDS + 1):
            yield " ".join(words[start : start + WORDS])


def repeated(product: list[str], tests: dict[str, str]) -> dict[str, list[str]]:
    """Return the phrases of the product that several test files have, with these files."""
    messages = [text for source in product for text in texts(source) if len(re.findall(r"\w+", text)) > WORDS]
    known = {phrase for text in messages for phrase in phrases(text)}
    found = defaultdict(list)
    for name, source in tests.items():
        for phrase in sorted({phrase for text in texts(source) for phrase in phrases(text)} & known):
            found[phrase].append(name)
    return {phrase: names for phrase, names in found.items() if len(names) > 1}


def sources(*folders: str) -> dict[str, str]:
    paths: list[Path] = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def test_which_phrases_are_repeated():
    docstring = '"""A docstring is read by nobody who runs the program."""'
    message = 'f"{path} is here, and nobody knows the name that it has now: {error}"'
    product = [f"def f(path):\n    {docstring}\n    raise ValueError({message})\n"]
    once = 'match="is here, and nobody knows the name that"'
    again = 'match=r"a.txt is here, and nobody knows the name that it"'
    shorter = 'match="a.txt is here, .* name that it has now"'
    assert repeated(product, {"a": once, "b": shorter, "c": f"x = {docstring}", "d": f"x = {docstring}"}) == {}
    assert repeated(product, {"a": once, "b": again}) == {"is here and nobody knows the name that": ["a", "b"]}
    name = 'KIND = "row that is held out as well, too"'
    assert repeated([name], {"a": name, "b": name}) == {}
    assert len(repeated([name.replace("too", "too much")], {"a": name, "b": name})) == 1


@pytest.mark.ci  # parses the whole project
def test_a_message_is_written_out_in_one_test_file():
    tests = sources("tests")
    assert len(tests) > 300
    assert repeated(list(sources(*PACKAGES).values()), tests) == {}
