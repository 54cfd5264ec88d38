"""Every file in `configs/` is a run: it says how to start it, loads, and its batches have a solution."""

from pathlib import Path

import pytest

from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.load import check_trainable, load_config
from rl_vlm.plan.packaged import packaged_config
from tests.helpers.dry_runs import CONFIGS, KEPT, ROOT, TINY, dry_run, kept_file, num_processes, opening_comment

READY = [path for path in CONFIGS if path.stem not in TINY]
"""Configs whose model and data are on the hub, which tests cannot reach."""

WITHOUT_PLAN = {"OpenGVLab/InternVL3-2B-hf", "openbmb/MiniCPM-V-4.6"}
"""Models whose config.json does not ship with the package."""


def test_there_are_configs():
    assert "digits.yaml" in [path.name for path in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_loads_and_its_batches_have_a_solution(path: Path):
    config = load_config(path)
    check_trainable(config)
    batch = batch_sizes(config, num_processes(path))
    assert batch.completions_per_step > 1
    if path in READY:
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


@pytest.mark.parametrize("path", READY, ids=lambda path: path.name)
def test_a_ready_file_says_what_it_needs_and_that_nobody_has_run_it(path: Path):
    lines = opening_comment(path).splitlines()
    for start in ("# Disk: ", "# Expect: ", "# Planned memory: ", "# Not run."):
        assert any(line.startswith(start) for line in lines), start
    model = load_config(path).model.model_name_or_path
    assert (packaged_config(model) is None) == (model in WITHOUT_PLAN)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
@pytest.mark.ci
def test_a_dry_run_prints_what_is_kept(path: Path):
    """After a wanted change: `python -m tests.helpers.dry_runs`, and read the difference."""
    assert dry_run(path) == kept_file(path).read_text()


def test_only_what_an_earlier_run_writes_is_missing():
    found = {
        file.stem: [line for line in file.read_text().splitlines() if line.startswith("# Problem: ")]
        for file in sorted(KEPT.iterdir())
    }
    assert found.keys() == {path.stem for path in CONFIGS}
    missing = found.pop("digits_lora")
    assert [line.split(";")[0] for line in missing] == [
        "# Problem: model.model_name_or_path runs/digits/checkpoint-20 does not exist"
    ]
    assert not any(found.values())
