"""Runs on several sources: killed and resumed, evaluated by source."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch import cli
from rl_vlm.config.describe import to_yaml
from rl_vlm.errors import CheckpointError
from rl_vlm.run.run import train
from tests.helpers import tiny_run
from tests.helpers.resuming import assert_same_run, config_of, resumed, train_until
from tests.helpers.tiny_run import completions, make_config

OTHER_ROWS = f"{__name__}:other_rows"
WEIGHTED: list[Any] = [{"name": tiny_run.ROWS, "weight": 1}, {"name": OTHER_ROWS, "weight": 3}]


def other_rows() -> list[dict[str, Any]]:
    """Three rows in the layout of EasyR1."""
    return [
        {"problem": "<image>Which letter is this?", "answer": "A", "images": [tiny_run.noise(200 + i)]}
        for i in range(3)
    ]


def sources(output_dir: Path) -> list[str]:
    """The sources of the prompts in the order of the steps."""
    files = completions(output_dir)
    return [row["prompt"] for name in sorted(files) for row in files[name] if row["completion_index"] == 0]


def test_a_run_killed_within_an_epoch_is_resumed(tiny_checkpoint, tmp_path, monkeypatch):
    straight, killed = (
        config_of("window", tiny_checkpoint, tmp_path / name, dataset_name=WEIGHTED) for name in ("straight", "killed")
    )
    train(straight)
    train_until(4, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


def test_resuming_with_other_weights_or_rows_is_refused(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path / "run", dataset_name=WEIGHTED, max_steps=1))
    settings = {"max_steps": 2, "resume_from_checkpoint": "auto"}
    equal = [entry | {"weight": 1} for entry in WEIGHTED]
    with pytest.raises(CheckpointError, match="drew its data with shares"):
        train(make_config(tiny_checkpoint, tmp_path / "run", dataset_name=equal, **settings))
    fewer = [tiny_run.ROWS]
    with pytest.raises(CheckpointError, match="the training data has changed"):
        train(make_config(tiny_checkpoint, tmp_path / "run", dataset_name=fewer, **settings))


def test_shares_of_a_run(tiny_checkpoint, tmp_path):
    config = make_config(tiny_checkpoint, tmp_path / "run", dataset_name=WEIGHTED, prompts_per_step=5, max_steps=3)
    train(config)
    prompts = [str(prompt) for prompt in sources(tmp_path / "run")]
    assert len(prompts) == 15  # one epoch
    assert sum("letter" in prompt for prompt in prompts) == 11  # 3/4 of 15, rounded down: the twelfth would be next


def test_figures_by_source(tiny_checkpoint, tmp_path):
    names = [tiny_run.HELD_OUT_ROWS, OTHER_ROWS]
    config = make_config(tiny_checkpoint, tmp_path, eval_dataset_name=names)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert cli.main(["eval", str(tmp_path / "run.yaml"), "--by", "data_source"]) == 0
    by_source = json.loads((tmp_path / "evaluation" / "summary.json").read_text())["by"]["data_source"]
    assert {name: figures["num_samples"] for name, figures in by_source.items()} == dict(
        zip(names, (5, 3), strict=True)
    )
