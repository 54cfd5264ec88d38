"""Trajectories on the page of a report."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rl_vlm.config.schema import LogConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.log.completions import CompletionsLog, window_path, write_rows
from rl_vlm.tools.report.build import build_page
from rl_vlm.tools.report.curves import charts_of
from rl_vlm.tools.report.read import RunResults, read_runs
from rl_vlm.tools.report.rollouts import browser_data
from rl_vlm.tools.report.turns import GroupTurns, reward_by_turns
from rl_vlm.types import Context, Prompt, RewardTable, Sample, ToolResult, Turn, Video
from tests.helpers.builders import make_trajectories, noise_image, png
from tests.helpers.run_directory import SETTINGS, completion_row, write_run

RESULTS = [
    {"text": "the crop", "images": 2, "kept": ["images/0.jpg"], "error": None, "seconds": 0.1},
    {"text": "no such box", "images": 0, "error": "no such box", "seconds": 0.0},
]
TURNS: list[dict[str, Any]] = [
    {"text": "<b>Look</b> <call>", "calls": [{"name": "crop", "arguments": {}}] * 2, "results": RESULTS},
    {"text": "7", "calls": [], "results": [], "reward": 0.5, "advantage": -1.25},
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
        {"text": "7", "calls": [], "results": [], "reward": 0.5, "advantage": -1.25},
    ]  # fmt: skip
    assert "Reward by number of turns" in build_page(runs)


def test_runs_of_single_turns_have_none(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "run")])
    assert "turns" not in browser_data(runs)["groups"][0]["rows"][0]
    assert "Reward by number of turns" not in build_page(runs)


def test_damaged_turns_are_left_out() -> None:
    damaged = [TURNS[0] | {"results": [results]} for results in ({"text": 1}, RESULTS[0] | {"digests": None})]
    for turns in ("{", "[1]", "[{}]", '{"a": 1}', *(json.dumps([turn]) for turn in damaged)):
        group = GroupTurns([completion_row(0, 0, 0, 1.0, {"turns": turns})])
        assert group.described(0, lambda name: None, str) == [] and group.parting(0) is None


def test_a_figure_that_json_does_not_have_is_left_out() -> None:
    turns = json.dumps([TURNS[1] | {"reward": float("nan"), "advantage": float("inf")}])
    (turn,) = GroupTurns([completion_row(0, 0, 0, 1.0, {"turns": turns})]).described(0, lambda name: None, str)
    assert turn == {"text": "7", "calls": [], "results": []}


def game(*steps: str, kept: int = 0, **more: Any) -> dict[str, Any]:
    """A row of a game. A step is an action and the digest of the picture after it; `kept` pictures have copies."""
    turns = []
    for i, (action, digest) in enumerate(steps):
        paths = {"kept": [f"images/{digest}.jpg"]} if i < kept else {}
        result = {"text": "", "images": 1, "digests": [digest], **paths, "error": None, "seconds": 0.1}
        turns.append({"text": action, "calls": [], "results": [result]})
    return completion_row(0, 0, 0, 1.0, {"turns": json.dumps(turns), "num_turns": len(steps), **more})


def test_completions_part_at_the_first_turn_that_no_sibling_has() -> None:
    group = GroupTurns([
        game("lx", "ly", "rz"), game("lx", "ly", "ry"), game("lx", "uy", "uz"), game("rx"), game("lx", "ly"),
        game("lx", "ly", "rz", "rw"), game("rx"), game("lx", prompt="user: <image> Another start"),
    ])  # fmt: skip
    assert [group.parting(i) for i in range(8)] == [
        None, {"turn": 2, "from": [0, 4, 5]}, {"turn": 1, "from": [0, 1, 4, 5]}, None, None,
        {"turn": 3, "from": [0]}, None, None,
    ]  # fmt: skip


def test_the_same_action_with_another_picture_parts() -> None:
    group = GroupTurns([game("lx", "ly"), game("lx", "lz")])
    assert [group.parting(i) for i in range(2)] == [{"turn": 1, "from": [1]}, {"turn": 1, "from": [0]}]


def test_a_frame_that_a_sibling_has_kept_is_shown() -> None:
    group = GroupTurns([game("l0", "l1", "r2", kept=2), game("l0", "u3", "l1")])
    seen = [[turn["results"][0] for turn in group.described(i, lambda path: int(path[7]), str)] for i in range(2)]
    assert [[result["images"] for result in results] for results in seen] == [[[0], [1], []], [[0], [], [1]]]
    assert [[result["left"] for result in results] for results in seen] == [[0, 0, 1], [0, 1, 0]]


def test_images_of_prompts_come_before_those_of_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = json.dumps([TURNS[0] | {"results": [RESULTS[0] | {"kept": ["images/frame.jpg"]}]}])
    folder = write_run(tmp_path / "run", SETTINGS, COLUMNS | {"turns": frames})
    Image.new("RGB", (40, 20), "blue").save(folder / "completions" / "images" / "frame.jpg")
    for most, expected, left in ((3, [2], 1), (2, [], 2)):
        monkeypatch.setattr("rl_vlm.tools.report.rollouts.MOST_IMAGES", most)
        group = browser_data(read_runs([folder]))["groups"][0]
        result = group["rows"][0]["turns"][0]["results"][0]
        assert (group["images"], result["images"], result["left"]) == ([0], expected, left)


def film(*levels: int) -> Video:
    """Grey frames of 64 x 48 pixels, four in a second."""
    frames = np.stack([np.full((48, 64, 3), level, np.uint8) for level in levels])
    return Video(frames, tuple(range(len(levels))), 4.0, len(levels), len(levels) / 4)


def pictures_of(data: dict[str, Any]) -> list[Image.Image]:
    """The images and strips of a page."""
    return [Image.open(io.BytesIO(base64.b64decode(each.partition(",")[2]))) for each in data["images"]]


def levels_of(strip: Image.Image) -> list[int]:
    """The grey in the middle of each frame of a strip, to the next ten. Frames have 128 x 96 pixels, and gaps 2."""
    greys = np.asarray(strip.convert("L"))[30, 64::130]
    return [10 * round(int(grey) / 10) for grey in greys]


def test_clips_of_the_prompt_and_of_turns_are_strips_of_frames(tmp_path: Path) -> None:
    """As the run writes them. The second completion sees the clip again, and another one."""
    sample = Sample("row", [], [], {}, "", videos=[film(20, 60)])
    seen, other = film(40, 80, 120, 160), film(200)
    shown = ToolResult([{"type": "video"}, {"type": "image"}], (seen.encoded(), png(noise_image(40, 30, seed=1))))
    again = ToolResult([{"type": "video"}, {"type": "video"}], (seen.encoded(), other.encoded()), "it is over")
    steps = [(Turn("Look.", "Look.", (), (result,)), Turn("7", "7")) for result in (shown, again)]
    prompt = Prompt(sample, torch.arange(5), {}, {})
    made = make_trajectories(prompt, [[Context((2, 1))]] * 2)
    completions = [replace(c, turns=turns) for c, turns in zip(made.group.completions, steps, strict=True)]
    group = replace(made, group=replace(made.group, completions=completions))
    folder = write_run(tmp_path / "run")
    for step in (0, 1):
        window_path(folder, step).unlink()
    masks = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.bool)
    log = CompletionsLog(folder, Ranks(), LogConfig(log_completions=True), num_prompts=1)
    log.write(0, [group], RewardTable(["exact_match"], torch.zeros(1, 2, 1), *masks))

    data = browser_data(read_runs([folder]))
    (found,) = [each for each in data["groups"] if each["id"] == "row"]
    assert found["videos"] == [{"strip": 0, "from": 0.0, "to": 0.5}]
    results = [row["turns"][0]["results"][0] for row in found["rows"]]
    assert [(one["images"], one["left"], one["failed"]) for one in results] == [([1, 2], 0, False), ([1, 3], 0, True)]
    strip, turn, image, last = pictures_of(data)[:4]
    assert [each.size for each in (strip, turn, image, last)] == [(258, 96), (518, 96), (40, 30), (128, 96)]
    assert list(map(levels_of, (strip, turn, last))) == [[20, 60], [40, 80, 120, 160], [200]]


def test_a_completion_with_a_start_of_its_own_has_its_picture(tmp_path: Path) -> None:
    rows = [game("lx"), game("lx"), game("lx", images=["images/1.jpg"])]
    folder = write_run(tmp_path / "run")
    write_rows(window_path(folder, 0), rows)
    group = browser_data(read_runs([folder]))["groups"][0]
    assert (group["images"], [row.get("start") for row in group["rows"]]) == ([0], [None, None, [1]])


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
    names = ("environment/turns", "tools/failure_frequency", "environment/engine_wait_fraction")
    lines = [{"step": i} | dict.fromkeys(names, 0.1 * (1 + i)) for i in range(2)]
    charts = charts_of([RunResults("run", Path(), "training", lines=lines)])
    assert [chart.title for chart in charts.internals] == ["Turns", "Failed calls", "Waiting for tools"]
