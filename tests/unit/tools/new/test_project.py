"""New projects: their files, rows, rewards and settings, and the errors of `rl-vlm new`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from launch import cli
from rl_vlm.config.load import check_trainable, load_config
from rl_vlm.data.samples import load_rows
from rl_vlm.functions import load_function
from rl_vlm.tools.new.families import FAMILIES

ROOT = Path(__file__).parents[4]
PICTURED = ["answer", "box"]
"""Kinds whose rows have pictures."""
GAME = "environment"
KINDS = [*PICTURED, GAME]
FILES = {"answer": {"reward.py"}, "box": {"reward.py"}, GAME: {"environment.py", "test_environment.py"}}
"""Files that not all kinds have."""
NUM_ROWS = {"answer": (1024, 256), "box": (1024, 256), GAME: (192, 48)}


def new(*words: str) -> int:
    return cli.main(["new", *words])


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project of each kind."""
    folder = tmp_path_factory.mktemp("projects")
    for kind in KINDS:
        assert new(str(folder / kind), "--kind", kind, "--family", "internvl") == 0
    return folder


def rows(project: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project / "data" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_a_project(kind: str, projects: Path):
    project = projects / kind
    assert {path.name for path in project.iterdir()} == {"README.md", "data", "model.py", "run.yaml"} | FILES[kind]
    files = {path.relative_to(project / "data").parts[0] for path in (project / "data").rglob("*.*")}
    assert files == {"test.jsonl", "train.jsonl"} | ({"images"} if kind in PICTURED else set())
    assert len(list((project / "data").rglob("*.png"))) == (1280 if kind in PICTURED else 0)
    assert [path.name for path in projects.iterdir() if path.name.startswith(".")] == []
    texts = [path.read_text() for path in project.iterdir() if path.is_file()]
    assert not any("{{" in text or "{%" in text for text in texts)
    assert "internvl" in (project / "model.py").read_text()
    assert "OpenGVLab/InternVL3-2B-hf" in (project / "README.md").read_text()
    assert max(len(line) for line in (project / "run.yaml").read_text().splitlines()) <= 120


@pytest.mark.parametrize("kind", PICTURED)
def test_no_picture_is_in_both_parts(kind: str, projects: Path):
    data = projects / kind / "data"
    pictures = {
        name: {(data / row["image"]).read_bytes() for row in rows(projects / kind, name)} for name in ("train", "test")
    }
    assert len(pictures["train"]) > 1000 and len(pictures["test"]) > 250
    assert not pictures["train"] & pictures["test"]


def test_the_same_command_writes_the_same_rows_and_pictures(projects: Path, tmp_path: Path):
    assert new(str(tmp_path / "again"), "--kind", "answer", "--family", "qwen3_vl") == 0
    first, again = projects / "answer/data", tmp_path / "again/data"
    names = ["train.jsonl", "test.jsonl", "images/train-0000.png", "images/test-0255.png"]
    assert [(first / name).read_bytes() for name in names] == [(again / name).read_bytes() for name in names]


def test_held_out_games_start_as_no_other(projects: Path):
    """On 4 x 4 cells there are 16 * 15 pairs of a start and another goal."""
    pairs = [(*row["start"], *row["goal"]) for name in ("train", "test") for row in rows(projects / GAME, name)]
    assert len(pairs) == len(set(pairs)) == 240
    assert all(set(pair) <= {0, 1, 2, 3} and pair[:2] != pair[2:] for pair in pairs)


def test_the_tests_of_a_new_environment_pass(projects: Path):
    command = [sys.executable, "-B", "-m", "unittest"]
    done = subprocess.run(command, cwd=projects / GAME, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "OK")
    assert "Ran 5 tests" in done.stderr


def test_a_dry_run_checks_a_new_environment(
    projects: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(projects / GAME)
    assert cli.main(["train", "run.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "# Checked: model: the function model.py:starting_model loads." in printed
    assert "# Checked: train data data/train.jsonl: 192 rows" in printed


def test_solutions_are_the_numbers_of_dots(projects: Path):
    """A dot has a radius of 6 pixels, so it darkens 113 pixels from grey 120 to 20."""
    for row in rows(projects / "answer", "test")[:60]:
        pixels = np.asarray(Image.open(projects / "answer/data" / row["image"]).convert("L"), dtype=float)
        assert (120 - pixels).sum() / (100 * 113) == pytest.approx(int(row["solution"]), abs=0.2)


def test_solutions_are_the_boxes_of_squares(projects: Path):
    """In thousandths of 64 pixels, up to a pixel that is partly red."""
    for row in rows(projects / "box", "test")[:60]:
        pixels = np.asarray(Image.open(projects / "box/data" / row["image"]), dtype=int)
        ys, xs = np.nonzero(pixels[..., 0] - pixels[..., 2] > 10)
        found = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        assert np.abs(np.array(found) / 64 * 1000 - row["solution"]).max() < 17


@pytest.mark.parametrize("kind", KINDS)
def test_settings_load_and_rows_are_read(kind: str, projects: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(projects / kind)
    config = load_config("run.yaml")
    check_trainable(config)
    train, test = load_rows(config.data, "train"), load_rows(config.data, "eval")
    assert (len(train), len(test)) == NUM_ROWS[kind]
    assert [image.size for image in train[0].images] == ([(64, 64)] if kind in PICTURED else [])
    assert config.rollout.num_generations == (8 if kind == GAME else 16)
    algorithm = (config.algorithm.num_iterations, config.algorithm.epsilon_high)
    assert (*algorithm, config.train.lr_scheduler_type) == (4, 0.5, "cosine")


def reward(projects: Path, kind: str, name: str) -> Callable[..., list[float]]:
    return load_function(f"{projects / kind / 'reward.py'}:{name}")


def test_the_reward_of_answers(projects: Path):
    texts = [
        "<answer>3</answer>", "I see <answer> 3 </answer>.", "<answer>4</answer>", "3", "",
        "<answer>3</answer><answer>4</answer>",
    ]  # fmt: skip
    right = reward(projects, "answer", "right")
    assert right(texts, ["3"] * 6, id=["x"] * 6) == [1, 1, 0, 0, 0, 0]
    assert right(["<answer>1</answer>", "<answer>3</answer>"], ["1", "3"]) == [1, 1]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert right(messages, ["3"] * 6) == [1, 1, 0, 0, 0, 0]


BOXES = [
    ("[0, 0, 200, 200]", 1.0, 1.0),
    ("[0, 0, 200, 100]", 0.5, 0.75),
    ("[200, 0, 400, 200]", 0.0, 0.5),  # beside it
    ("[300, 0, 500, 200]", 0.0, 0.4),  # a fifth of the box around both is between them
    ("[200, 200, 0, 0]", 0.0, 0.0),  # corners in the wrong order
    ("[0, 0, 200]", 0.0, 0.0),
    ('[0, 0, 200, 200]} {"bbox_2d": [0, 0, 1, 1]', 0.0, 0.0),  # two boxes
]


def test_the_rewards_of_boxes(projects: Path):
    texts = [f'{{"bbox_2d": {box}}}' for box, _, _ in BOXES]
    for name, expected in (("overlap", [each[1] for each in BOXES]), ("nearness", [each[2] for each in BOXES])):
        function = reward(projects, "box", name)
        assert function(texts, [[0, 0, 200, 200]] * len(texts)) == pytest.approx(expected)


def test_what_exists_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "file", "link"):
        assert new(str(tmp_path / name)) == 2
        assert f"{name} exists already; give the name of a new directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "mine"]
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kind", "boxes"], "there is no kind 'boxes' (did you mean 'box'?); give one of answer, box, environment"),
        (["--family", "qwen3vl"], "there is no family 'qwen3vl' (did you mean 'qwen3_vl'?); give one of qwen2_5_vl, "),
        (["--family", "smolvlm"], "there is no family 'smolvlm'"),
    ],
)
def test_unknown_names_are_answered_with_those_that_there_are(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert new(str(tmp_path / "mine"), *words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_kind_that_the_tiny_model_of_a_family_does_not_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert new(str(tmp_path / "mine"), "--kind", "box", "--family", "llava") == 2
    message = "no tiny llava learns tasks of the kind 'box'; give a family of qwen2_5_vl, qwen3_vl, internvl"
    assert f"{message}\n" in capsys.readouterr().err


def test_a_name_with_a_line_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert new(str(tmp_path / "mine\nmodel: x")) == 2
    assert "is no name for a project" in capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert new(str(tmp_path / "none/mine")) == 2
    assert "none/mine cannot be written: " in capsys.readouterr().err


def test_nothing_is_left_if_pictures_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert new(str(tmp_path / "mine")) == 2
    assert "mine cannot be written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_help_lists_kinds_and_families(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        new("--help")
    text = capsys.readouterr().out
    assert "  answer      a number in <answer> tags" in text and "  environment a game of several turns" in text
    assert [name for name in ("qwen2_5_vl", "qwen3_vl", "internvl", "gemma3") if f"\n  {name} " not in text] == []


def test_the_page_has_a_score_of_every_family_and_kind():
    page = (ROOT / "docs/new_project.md").read_text()
    offered = [(name, kind) for name, family in FAMILIES.items() for kind in family.settings]
    assert [each for each in offered if f"| `{each[0]}` | {each[1]} |" not in page] == []
