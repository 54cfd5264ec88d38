"""Every file in `configs/` is a run: it says how to start it, loads, and its batches have a solution."""

import re
from pathlib import Path

import pytest

from launch.dry_run import dry_run_training
from rl_vlm.config.batches import plan_batches
from rl_vlm.config.load import check_trainable, load_config
from rl_vlm.plan.packaged import packaged_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


FROM_HUB = [path for path in CONFIGS if path.name.startswith("qwen")]
"""Configs whose model and data are on the hub, which tests cannot reach."""


def opening_comment(path: Path) -> str:
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def num_processes(path: Path) -> int:
    """Number of processes that a config's own command starts."""
    named = re.search(r"--num_processes (\d+)", opening_comment(path))
    return int(named[1]) if named else 1


def test_there_are_configs():
    assert "digits.yaml" in [path.name for path in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_loads_and_its_batches_have_a_solution(path: Path):
    config = load_config(path)
    check_trainable(config)
    batch = plan_batches(config, num_processes(path))
    assert batch.completions_per_step > 1
    if path in FROM_HUB:
        product = (
            f"{batch.prompts_per_step} prompts x {batch.num_generations} = {batch.completions_per_step} completions"
        )
        assert product in opening_comment(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_opens_with_its_command_and_what_to_expect(path: Path):
    comment = opening_comment(path)
    command = "rl-vlm train" if num_processes(path) == 1 else "-m launch.train"
    assert f"{command} {path.relative_to(ROOT)}" in comment
    assert "Expect:" in comment


@pytest.mark.parametrize("path", FROM_HUB, ids=lambda path: path.name)
def test_a_config_of_a_model_on_the_hub_can_be_planned_without_it(path: Path):
    assert packaged_config(load_config(path).model.model_name_or_path) is not None


@pytest.mark.parametrize("path", [p for p in CONFIGS if p not in FROM_HUB], ids=lambda path: path.name)
def test_a_config_passes_a_dry_run_but_for_what_another_run_writes(path: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, problems = dry_run_training(load_config(path, [f"output_dir={tmp_path}"]))
    written = [f"model.model_name_or_path {name} does not exist" for name in ("runs/digits/checkpoint-20",)]
    assert [problem for problem in problems if not problem.startswith(tuple(written))] == []
