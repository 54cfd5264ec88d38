"""Which settings name files, and which file a name stands for."""

import os
from pathlib import Path

import pytest

from rl_vlm.config.named_files import SYSTEMS, local_file
from rl_vlm.config.schema import RolloutConfig, RunConfig
from rl_vlm.evaluation.run import tools_that_matter
from rl_vlm.rollout.environments.adapters import ADAPTERS, VERL
from rl_vlm.tools.checks.ranks import named_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file, a module, a package, an environment of packages, and a folder of data."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "games/maze.py", "games/__init__.py", "venv/site-packages/other.py", "rows/a.parquet"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mine.py:f", "mine.py"),
        ("absent.py:f", "absent.py"),
        ("verl:mine.py:f", "mine.py"),
        ("verl:/there/tools.py:f", "/there/tools.py"),
        ("mine:Class", "mine.py"),
        ("games.maze:Maze", "games/maze.py"),
        ("games:Maze", "games/__init__.py"),
        ("vagen:games.maze.Maze", "games/maze.py"),
        ("skyrl:games.maze:maze", "games/maze.py"),
        ("gymnasium:games.maze:Maze-v0", "games/maze.py"),
        ("rows", "rows"),
        ("/there/rows.parquet", "/there/rows.parquet"),
        ("./model", "model"),
        ("verl:json:dumps", None),
        ("gymnasium:FrozenLake-v1", None),
        ("gymnasium:Maze-v0.1", None),
        ("openenv:http://mine:8000", None),
        ("skyrl:aime", None),
        ("venv.site-packages.other:f", None),
        ("json:dumps", None),
        ("rl_vlm.algorithm.losses:clipped_loss", None),
        ("exact_match", None),
        ("draws:8", None),
        ("absent.jsonl", "absent.jsonl"),
        ("Qwen/Qwen2.5-VL-3B", None),
        ("python:mine.py#0123456789ab", None),
    ],
)
def test_the_file_that_a_name_stands_for(name: str, expected: str | None) -> None:
    found = local_file(name)
    assert (None if found is None else str(found)) == expected


def test_ranks_compare_the_files_of_tools_and_environments(folder: Path) -> None:
    rollout = {"tools": ["verl:mine.py:f"], "environment": "games.maze:Maze"}
    values = {"model": {"model_name_or_path": "Qwen/Qwen2.5-VL-3B"}, "train": {"output_dir": "none"}}
    found = named_files(RunConfig.model_validate(values | {"rollout": rollout}))
    assert found.keys() == {"mine.py", "games/maze.py"}
    Path("mine.py").write_text("1")
    after = named_files(RunConfig.model_validate(values | {"rollout": rollout}))
    assert found["mine.py"] != after["mine.py"] and found["games/maze.py"] == after["games/maze.py"]


def test_all_prefixes_of_other_systems_are_known() -> None:
    assert sorted({*ADAPTERS, VERL.removesuffix(":")}) == list(SYSTEMS)


@pytest.mark.parametrize("name", ["verl:mine.py:f", "mine:f", "mine.py:f"])
def test_an_evaluation_notices_a_changed_tool(name: str) -> None:
    before = tools_that_matter(RolloutConfig(tools=[name]))
    assert before == tools_that_matter(RolloutConfig(tools=[name]))
    os.utime("mine.py", (1, 1))
    assert before != tools_that_matter(RolloutConfig(tools=[name]))
    assert before["files"][0][0][0] == "mine.py"
