"""Functions fit a screen."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 60
"""Lines, from `def` to the last line of the body."""


def function_lengths() -> list[tuple[int, str]]:
    """Lines and place of every function, the longest first."""
    return sorted(
        (
            (node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
            for package in ("rl_vlm", "rewards", "launch", "examples")
            for path in (ROOT / package).rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        ),
        reverse=True,
    )


def test_no_function_is_longer_than_a_screen():
    lengths = function_lengths()
    print("longest functions (shown with -s):", *lengths[:5], sep="\n")
    assert len(lengths) > 200
    assert [place for lines, place in lengths if lines > LONGEST] == []
