"""The tables of docs/built_in_rewards.md that say how a built-in reward function scores a completion.

A table has the columns `completion`, `with` and `score`. Its function is the last heading of level three before it.
Completions are Python strings, and what stands under `with` are keyword arguments: columns, as one row has them, and
settings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "built_in_rewards.md"
WITHOUT_TABLE = ("judge", "reward_model")
"""Functions whose scores no table can state: they need a server, or a model."""
HEADING = re.compile(r"### `(\w+)`")
ROW = re.compile(r"\| (?P<completion>`.+?`) \| (?P<arguments>.*?) \| (?P<score>[^|]+?) \|(?P<why>.*)")


@dataclass(frozen=True)
class StatedScore:
    """One row of a table."""

    function: str
    completion: str
    arguments: dict[str, Any]
    score: str
    """A number, `does not apply` or `fault`."""

    def __str__(self) -> str:
        return f"{self.function}: {self.completion[:40]!r}"


def stated_scores(page: str) -> Iterator[StatedScore]:
    """Read the rows of all tables."""
    function, in_table = "", False
    for line in page.splitlines():
        if heading := HEADING.match(line):
            function = heading[1]
        if line.startswith("| completion | with | score |"):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not line.startswith("|---"):
            yield read_row(function, line.replace("\\|", "\0"))


def stated_replies(page: str) -> Iterator[tuple[str, str]]:
    """Read the table with the columns `reply` and `score`, of a judge's replies."""
    table = page[page.index("| reply | score |") :].split("\n\n")[0]
    for reply, score in re.findall(r"^\| `(.+?)` \| (\S+) \|", table, re.MULTILINE):
        yield ast.literal_eval(reply), score


def read_row(function: str, line: str) -> StatedScore:
    row = ROW.fullmatch(line)
    assert row is not None, f"{function}: a row has another form: {line}"
    completion, arguments = (row[name].strip("`").replace("\0", "|") for name in ("completion", "arguments"))
    call = ast.parse(f"f({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return StatedScore(function, ast.literal_eval(completion), keywords, row["score"].strip())
