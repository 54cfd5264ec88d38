"""Trajectories on the page of a report."""

import json
from pathlib import Path
from typing import Any

from rl_vlm.tools.report.build import build_page
from rl_vlm.tools.report.curves import charts_of
from rl_vlm.tools.report.read import RunResults, read_runs
from rl_vlm.tools.report.rollouts import browser_data
from rl_vlm.tools.report.turns import described_turns, reward_by_turns
from tests.helpers.run_directory import SETTINGS, completion_row, write_run

RESULTS = [
    {"text": "the crop", "images": 2, "kept": ["images/0.jpg"], "error": None, "seconds": 0.1},
    {"text": "no such box", "images": 0, "error": "no such box", "seconds": 0.0},
]
TURNS: list[dict[str, Any]] = [
    {"text": "<b>Look</b> <call>", "calls": [{"name": "crop", "arguments": {}}] * 2, "results": RESULTS},
    {"text": "7", "calls": [], "results": []},
]
COLUMNS = {"turns": json.dumps(TURNS), "num_turns": 2, "environment": None, "observed_length": 5}


def test_turns_are_in_the_browser_with_their_images(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "run", SETTINGS, COLUMNS)])
    group = browser_data(runs)["groups"][0]
    assert group["images"] == [0]  # of another file
    assert group["rows"][0]["turns"] == [
        {"text": "<b>Look</b> <call>", "calls": ["crop", "crop"], "results": [
            {"text": "the crop", "images": [1], "left": 1, "failed": False},
            {"text": "no such box", "images": [], "left": 0, "failed": True},
        ]},
        {"text": "7", "calls": [], "results": []},
    ]  # fmt: skip
    assert "Reward by number of turns" in build_page(runs)


def test_runs_of_single_turns_have_none(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "run")])
    assert "turns" not in browser_data(runs)["groups"][0]["rows"][0]
    assert "Reward by number of turns" not in build_page(runs)


def test_damaged_turns_are_left_out() -> None:
    for turns in ("{", "[1]", "[{}]", '{"a": 1}', json.dumps([TURNS[0] | {"results": [{"text": 1}]}])):
        assert described_turns({"turns": turns}, lambda name: None, str) == []


def test_a_kept_image_outside_of_the_run_is_not_read(tmp_path: Path) -> None:
    stolen = json.dumps([TURNS[0] | {"results": [RESULTS[0] | {"kept": ["../../../secret.jpg"]}]}])
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    runs = read_runs([write_run(tmp_path / "run", SETTINGS, COLUMNS | {"turns": stolen})])
    (result,) = browser_data(runs)["groups"][0]["rows"][0]["turns"][0]["results"]
    assert (result["images"], result["left"]) == ([], 2)


def test_long_turns_are_cut_together(tmp_path: Path) -> None:
    long = json.dumps([TURNS[0] | {"text": "x" * 2_000_000}, TURNS[1]])
    runs = read_runs([write_run(tmp_path / "run", SETTINGS, COLUMNS | {"turns": long})])
    rows = [row for group in browser_data(runs)["groups"] for row in group["rows"]]
    assert sum(len(turn["text"]) for row in rows for turn in row["turns"]) < 3_500_000


def test_reward_by_number_of_turns() -> None:
    numbers = [(1, 0.0), (3, 1.0), (3, 0.5), (2, None)]
    rows = [completion_row(0, 0, i, reward, {"num_turns": n}) for i, (n, reward) in enumerate(numbers)]
    found = reward_by_turns(RunResults("run", Path(), "training", rows=rows))
    assert [(one.num_turns, one.num_completions, one.reward) for one in found] == [
        (1, 1, 0.0),
        (2, 1, None),
        (3, 2, 0.75),
    ]


def test_curves_of_turns_and_failed_calls() -> None:
    lines = [{"step": i, "environment/turns": 2.0 + i, "tools/failure_frequency": 0.1 * i} for i in range(2)]
    charts = charts_of([RunResults("run", Path(), "training", lines=lines)])
    assert [chart.title for chart in charts.internals] == ["Turns", "Failed calls"]
