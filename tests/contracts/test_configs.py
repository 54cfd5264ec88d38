"""Every file in `configs/` is a run: it says how to start it, loads, and its batches have a solution."""

from pathlib import Path

import pytest

from launch.dry_run import dry_run_training
from rl_vlm.config.batches import plan_batches
from rl_vlm.config.load import check_trainable, load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def opening_comment(path: Path) -> str:
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def test_there_are_configs():
    assert "digits.yaml" in [path.name for path in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_loads_and_its_batches_have_a_solution(path: Path):
    config = load_config(path)
    check_trainable(config)
    assert plan_batches(config, world_size=1).completions_per_step > 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_opens_with_its_command_and_what_to_expect(path: Path):
    comment = opening_comment(path)
    assert f"rl-vlm train {path.relative_to(ROOT)}" in comment
    assert "Expect:" in comment


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_passes_a_dry_run_but_for_what_another_run_writes(path: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, problems = dry_run_training(load_config(path, [f"output_dir={tmp_path}"]))
    written = [f"model.model_name_or_path {name} does not exist" for name in ("runs/digits/checkpoint-20",)]
    assert [problem for problem in problems if not problem.startswith(tuple(written))] == []
