"""Files for `accelerate launch` and options of `rl-vlm plan`."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.plan import accelerate_file, add_plan_flags, planned_hardware
from rl_vlm.errors import ConfigError
from rl_vlm.plan.picture import FORMATS

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "launch" / "accelerate"


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_plan_flags(parser)
    return parser.parse_args([*given, "--gpu-memory", "80GB"])


@pytest.mark.parametrize(
    ("given", "gpus", "nodes", "sharding"),
    [
        ((), 1, 1, "ddp"),
        (("--gpus", "4", "--nodes", "2", "--sharding", "fsdp2"), 4, 2, "fsdp2"),
        (("--config_file", "zero3.yaml"), 8, 1, "zero3"),
        (("--config_file", "zero3_offload.yaml"), 8, 1, "zero3_offload"),
        (("--config_file", "zero2.yaml"), 8, 1, "zero2"),
        (("--config_file", "fsdp2.yaml", "--gpus", "4"), 4, 1, "fsdp2"),
        (("--config_file", "ddp.yaml", "--nodes", "2"), 8, 2, "ddp"),
    ],
)
def test_hardware_of_options(given: tuple[str, ...], gpus: int, nodes: int, sharding: str):
    given = tuple(str(LAUNCH / each) if each.endswith(".yaml") else each for each in given)
    found = planned_hardware(options(*given))
    assert (found.gpus, found.nodes, found.sharding.name) == (gpus, nodes, sharding)


def test_gpus_of_each_of_several_machines(tmp_path: Path):
    path = tmp_path / "launch.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\n")
    found = planned_hardware(options("--config_file", str(path)))
    assert (found.gpus, found.nodes) == (4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no settings"),
        ("- a\n- b\n", "has no settings"),
        ("a: [", "cannot be read"),
        ("distributed_type: MEGATRON_LM\n", "distributed_type MEGATRON_LM"),
        ("num_machines: 2\nnum_processes: 3\n", "num_processes 3"),
        ("num_machines: 0\n", "num_machines 0"),
        ("num_processes: many\n", "num_processes many"),
    ],
)
def test_files_that_cannot_be_planned(text: str, message: str, tmp_path: Path):
    path = tmp_path / "launch.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        accelerate_file(path)


def test_a_file_that_is_not_text(tmp_path: Path):
    path = tmp_path / "launch.yaml"
    path.write_bytes(b"\x80\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        accelerate_file(path)


def test_the_help_and_the_page_name_the_formats_of_a_picture():
    assert FORMATS == ("png", "svg", "pdf")
    parser = argparse.ArgumentParser()
    add_plan_flags(parser)
    for text in (parser.format_help(), (ROOT / "docs/memory.md").read_text()):
        described = " ".join(text.rpartition("--picture FILE")[2][:300].split())
        assert "PNG, SVG or PDF file" in described


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--gpus", "0"], "--gpus and --nodes must be at least 1"),
        (["--gpus", "many"], "argument --gpus: invalid int value: 'many'"),
        (["--nodes", "-1", "--gpu-memory", "80GB"], "--gpus and --nodes must be at least 1"),
        (["--gpu-memory", "h1000"], "(did you mean 'h100'?)"),
        (["--sharding", "zero4"], "argument --sharding: invalid choice: 'zero4'"),
        (["--picture", "plan.txt"], "--picture plan.txt has no ending of a picture: .png, .svg, .pdf"),
        (["--picture", "nowhere/plan.png"], "--picture"),
        (["--config_file", "nowhere.yaml"], "--config_file nowhere.yaml cannot be read"),
        (["--config_file", "zero.yaml"], "num_processes 3"),
        (["--confg_file", "zero.yaml"], "unrecognized arguments: --confg_file zero.yaml"),
    ],
)
@pytest.mark.ci
def test_a_wrong_option_ends_the_command_before_torch_is_imported(given: list[str], message: str, tmp_path: Path):
    (tmp_path / "zero.yaml").write_text("distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 3\n")
    (tmp_path / "run.yaml").write_text(
        "{model: {model_name_or_path: tiny}, data: {dataset_name: d}, rewards: {reward_funcs: choice}}"
    )
    program = (
        "import sys; from launch.cli import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as stop: status = stop.code\n"
        "sys.exit(f'torch was imported, status {status}' if 'torch' in sys.modules else status)"
    )
    command = [sys.executable, "-c", program, "plan", "run.yaml", *given]
    result = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (result.returncode, message in result.stderr.decode()) == (2, True), result.stderr.decode()
