"""Projects of `rl-vlm new` run from their own folder, and learn."""

import json
from pathlib import Path

import pytest

from launch import cli

GOALS = {"answer": ("right", 0.9), "box": ("overlap", 0.5), "environment": ("reached", 0.9)}
"""The function of each kind that tells the score, and the score on held-out rows that a run should reach."""


def make(kind: str, family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a project, and go there."""
    monkeypatch.chdir(folder)
    assert cli.main(["new", "my_task", "--kind", kind, "--family", family]) == 0
    monkeypatch.chdir(folder / "my_task")


def train(*overrides: str) -> dict:
    assert cli.main(["train", "run.yaml", "disable_tqdm=true", *overrides]) == 0
    return json.loads(Path("runs/first/summary.json").read_text())


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("answer", "internvl"),
        pytest.param("box", "qwen3_vl", marks=pytest.mark.slow),
        pytest.param("environment", "internvl", marks=pytest.mark.slow),
    ],
)
def test_a_project_runs_from_its_folder(
    kind: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    make(kind, family, tmp_path, monkeypatch)
    assert cli.main(["train", "run.yaml", "--dry-run"]) == 0
    if kind != "environment":  # whose function reads turns
        assert cli.main(["rewards", "check", "run.yaml", "-n", "100"]) == 0
        assert capsys.readouterr().out.endswith("\nnothing found\n")
    summary = train("max_steps=4", "eval_steps=0", "save_steps=0", "prompts_per_step=8")
    name, _ = GOALS[kind]
    assert summary["optimizer_steps"] == 4
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    step = next(line for line in lines if line["step"] == 1)
    assert 0.03 < step[f"rewards/{name}/mean"] < 0.4
    assert step["completions/clipped_ratio"] < 0.1 and step["frac_reward_faults"] == 0
    assert Path("runs/first/report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family"), [
    ("answer", "internvl"), ("answer", "qwen3_vl"), ("box", "qwen3_vl"), ("environment", "qwen3_vl"),
])  # fmt: skip
def test_a_project_learns(kind: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(kind, family, tmp_path, monkeypatch)
    summary = train()
    name, goal = GOALS[kind]
    assert summary["eval_before"][f"rewards/{name}/mean"] < 0.25
    assert summary["eval_after"][f"rewards/{name}/mean"] >= goal
    assert summary["verdict"]["outcome"] == "learned"
