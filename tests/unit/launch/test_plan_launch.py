"""What `rl-vlm plan --config_file` reads of a file for `accelerate launch`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.plan import accelerate_file
from rl_vlm.distributed import zero_config
from rl_vlm.errors import ConfigError, LaunchError

FILES = Path("launch/accelerate")


def a_file(path: Path, **deepspeed: Any) -> Path:
    asked = {"distributed_type": "DEEPSPEED", "num_machines": 2, "num_processes": 16, "deepspeed_config": deepspeed}
    path.write_text(yaml.safe_dump(asked))
    return path


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "zero3_offload", "fsdp2"])
def test_the_files_of_this_project(name: str):
    found = accelerate_file(FILES / f"{name}.yaml")
    assert (found["sharding"].name, found["nodes"], found["gpus"]) == (name, 1, 8)
    assert found["sharding"].reduce_bucket is None  # sizes follow the model's width


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
    assert (found["sharding"].name, found["nodes"], found["gpus"]) == (name, 2, 8)


def test_a_deepspeed_config_that_the_file_names(tmp_path: Path):
    zero = tmp_path / "zero.json"
    zero.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    found = accelerate_file(a_file(tmp_path / "file.yaml", deepspeed_config_file=str(zero)))["sharding"]
    assert (found.name, found.reduce_bucket) == ("zero3_offload_optimizer", 500_000_000)


@pytest.mark.parametrize("has_deepspeed", [True, False])
@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ('{"stage": 3, "offload_param": "cpu"}', "offload_param"),
        ('{"stage": 3, "offload_optimizer": ["cpu"]}', "offload_optimizer"),
        ('{"stage": 3, "offload_optimizer": {"device": "nvme"}}', "device nvme is not supported"),
        ('{"stage": 2, "offload_param": {"device": "cpu"}}', "offload_param needs stage 3"),
        ('{"stage": 2, "reduce_bucket_size": "big"}', "reduce_bucket_size"),
        ('{"stage": 2, "reduce_bucket_size": -5}', "reduce_bucket_size"),
        ('{"stage": 2, "reduce_bucket_size": null}', "reduce_bucket_size"),
        ('{"stage": 2, "reduce_bucket_size": 1e999}', "reduce_bucket_size"),
        ('{"stage": 2, "reduce_bucket_size": NaN}', "reduce_bucket_size"),
        ('{"stage": "3"}', "ZeRO stage 3 is not supported"),
        ('{"stage": [3]}', r"ZeRO stage \[3\] is not supported"),
        ("[" * 9999, "cannot be read"),
    ],
)
def test_deepspeed_configs_that_a_run_refuses(zero, message, has_deepspeed, tmp_path: Path, monkeypatch):
    if not has_deepspeed:  # `rl-vlm plan` needs none
        monkeypatch.setattr(zero_config, "find_spec", lambda name: None)
    (tmp_path / "zero.json").write_text(f'{{"zero_optimization": {zero}}}')
    with pytest.raises((ConfigError, LaunchError), match=message):
        accelerate_file(a_file(tmp_path / "file.yaml", deepspeed_config_file=str(tmp_path / "zero.json")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deepspeed_config": "x"}, "deepspeed_config is 'x': write it as a section"),
        ({"deepspeed_config": [1]}, r"deepspeed_config is \[1\]: write it as a section"),
        ({"deepspeed_config": {1: 2, "zero_stage": 7}}, "ZeRO stage 7 is not supported"),
        ({"distributed_type": "FSDP", "fsdp_config": [3]}, r"fsdp_config is \[3\]: write it as a section"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "fsdp_version is 1, but rl-vlm shards with"),
        ({"distributed_type": "FSDP"}, "fsdp_version is 1"),
        ({"distributed_type": ["DEEPSPEED"]}, "distributed_type"),
    ],
)
def test_files_for_accelerate_that_a_run_refuses(settings, message, tmp_path: Path):
    file = a_file(tmp_path / "file.yaml")
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | settings))
    with pytest.raises((ConfigError, LaunchError), match=message):
        accelerate_file(file)


def test_a_deepspeed_config_that_is_nowhere(tmp_path: Path):
    with pytest.raises(LaunchError, match=r"nowhere\.json cannot be read"):
        accelerate_file(a_file(tmp_path / "file.yaml", deepspeed_config_file=str(tmp_path / "nowhere.json")))
