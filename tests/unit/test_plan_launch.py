"""What `rl-vlm plan --config_file` reads of a file for `accelerate launch`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.plan import accelerate_file
from rl_vlm.errors import LaunchError

FILES = Path("launch/accelerate")


def a_file(path: Path, **deepspeed: Any) -> Path:
    asked = {"distributed_type": "DEEPSPEED", "num_machines": 2, "num_processes": 16, "deepspeed_config": deepspeed}
    path.write_text(yaml.safe_dump(asked))
    return path


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "zero3_offload", "fsdp2"])
def test_the_files_of_this_project(name: str):
    found = accelerate_file(FILES / f"{name}.yaml")
    assert (found["engine"].name, found["nodes"], found["gpus"]) == (name, 1, 8)
    assert found["engine"].reduce_bucket is None  # sizes follow the model's width


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "zero2"),
        ({"zero_stage": 1}, "zero1"),
        ({"zero_stage": 2, "offload_optimizer_device": "cpu"}, "zero2_offload"),
        ({"zero_stage": 3, "offload_optimizer_device": "cpu"}, "zero3_offload_optimizer"),
        ({"zero_stage": 3, "offload_optimizer_device": "none", "offload_param_device": "cpu"}, "zero3_offload_param"),
    ],
)
def test_what_is_offloaded(options, name, tmp_path: Path):
    found = accelerate_file(a_file(tmp_path / "file.yaml", **options))
    assert (found["engine"].name, found["nodes"], found["gpus"]) == (name, 2, 8)


def test_a_deepspeed_config_that_the_file_names(tmp_path: Path):
    zero = tmp_path / "zero.json"
    zero.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    found = accelerate_file(a_file(tmp_path / "file.yaml", deepspeed_config_file=str(zero)))["engine"]
    assert (found.name, found.reduce_bucket) == ("zero3_offload_optimizer", 500_000_000)


def test_a_deepspeed_config_that_is_nowhere(tmp_path: Path):
    with pytest.raises(LaunchError, match=r"nowhere\.json cannot be read"):
        accelerate_file(a_file(tmp_path / "file.yaml", deepspeed_config_file=str(tmp_path / "nowhere.json")))
