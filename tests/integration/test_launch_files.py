"""The files of `launch/accelerate`, on two CPU processes, and launches that are refused before the first step."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_vlm.config.describe import to_yaml
from tests.helpers.launching import FILES
from tests.helpers.tiers import in_tiers
from tests.helpers.tiny_run import build_checkpoint, make_config
from tests.helpers.two_processes import launch

pytest.importorskip("deepspeed", reason="DeepSpeed is in the development requirements on Linux only")

TRAINED = ["ddp", "zero2", "zero3", "zero3_offload", "fsdp2"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def run_file(checkpoint: Path, folder: Path, **settings: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(to_yaml(make_config(checkpoint, folder / "run", max_steps=2, **settings)))
    return path


def launch_file(file: Path, *arguments: str, module: str = "launch.train") -> subprocess.CompletedProcess[str]:
    """Start two processes with an accelerate file, as its head says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        return launch("--config_file", str(file), "--num_processes", "2", "-m", module, *arguments)


@pytest.mark.parametrize("name", in_tiers(TRAINED, fast=(), ci={"fsdp2"}))
def test_each_file_trains_on_two_cpu_processes(checkpoint: Path, tmp_path: Path, name: str):
    done = launch_file(FILES / f"{name}.yaml", str(run_file(checkpoint, tmp_path)))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["optimizer_steps"] == 2


def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    """Both processes end with status 2 and this message, without a traceback of theirs."""
    assert done.returncode != 0
    assert done.stderr.count(message) == 2, done.stderr
    assert "exitcode  : 2" in done.stderr and "exitcode  : 1" not in done.stderr
    assert "rl_vlm/" not in done.stderr  # a line of a traceback


def test_a_deepspeed_config_that_contradicts_the_run_is_refused_by_both_processes(checkpoint: Path, tmp_path: Path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}')
    content = yaml.safe_load((FILES / "zero2.yaml").read_text())
    content["deepspeed_config"] = {"deepspeed_config_file": str(tmp_path / "ds.json")}
    (tmp_path / "zero2.yaml").write_text(yaml.safe_dump(content))
    refused(
        launch_file(tmp_path / "zero2.yaml", str(run_file(checkpoint, tmp_path))),
        "the DeepSpeed config has optimizer",
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_layers_that_the_model_does_not_have_are_refused_by_both_processes(checkpoint: Path, tmp_path: Path):
    content = yaml.safe_load((FILES / "fsdp2.yaml").read_text())
    names = "Qwen2_5_VLDecoderLayer,Qwen2VLVisionBlock"
    content["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = names
    (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(content))
    done = launch_file(tmp_path / "fsdp2.yaml", str(run_file(checkpoint, tmp_path)))
    refused(done, "names Qwen2VLVisionBlock, which the model does not have")
    assert "It has layers of Qwen2_5_VLDecoderLayer, Qwen2_5_VLVisionBlock" in done.stderr
    assert not list((tmp_path / "run").glob("*.jsonl")) and not list((tmp_path / "run").glob("checkpoint-*"))


def test_an_evaluation_under_a_sharding_file_is_refused_by_both_processes(checkpoint: Path, tmp_path: Path):
    path = run_file(checkpoint, tmp_path, eval_dataset_name="tests.helpers.tiny_run:rows")
    refused(launch_file(FILES / "zero3.yaml", str(path), module="launch.evaluate"), "use launch/accelerate/ddp.yaml")


def test_one_process_trains_under_zero3(checkpoint: Path, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        file = ("--config_file", str(FILES / "zero3.yaml"), "--num_processes", "1")
        done = launch(*file, "-m", "launch.train", str(run_file(checkpoint, tmp_path)))
    assert done.returncode == 0, done.stderr
    assert os.path.isfile(tmp_path / "run/summary.json")
