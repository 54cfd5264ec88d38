"""The environment variables that `accelerate launch` sets for a file and options."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from accelerate.commands import launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

FILES = Path(__file__).parents[2] / "launch/accelerate"
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def environment_of(file: Path, *options: str) -> dict[str, str]:
    """Return the variables for several processes."""
    arguments = ["--config_file", str(file), "--num_processes", "2", "--main_process_port", "0", *options, "script.py"]
    parsed = launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))[0]
    parsed.deepspeed_fields_from_accelerate_config = ""
    environment = prepare_deepspeed_cmd_env(parsed)[1] if parsed.use_deepspeed else prepare_multi_gpu_env(parsed)
    return {name: value for name, value in environment.items() if name.startswith(PREFIXES)}


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Set these variables, and none else that accelerate reads."""
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
