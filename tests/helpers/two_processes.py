"""Runs of several processes on the CPUs of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RunConfig

REPOSITORY = Path(__file__).parents[2]


def launch(
    *arguments: str, timeout: float = 300, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` in the repository's root, with further environment variables, and wait for its end."""
    process = start(*arguments, environment=environment)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `accelerate launch` in the repository's root, with one thread per process and a port of its own.

    A script elsewhere can import the tests' helpers.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(free_port()), *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | dict(environment or {})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=pipe, stderr=pipe, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train_on_two_processes(config: RunConfig, path: Path) -> None:
    """Train with the settings of `config`, which are put in a file at `path`."""
    train_on_processes(2, config, path)


CPU = Path("launch/accelerate/cpu.yaml")


def train_on_processes(num: int, config: RunConfig, path: Path, launcher: Path = CPU) -> None:
    """Train with the settings of `config`, which are put in a file at `path`."""
    result = launch_training(num, config, path, launcher)
    assert result.returncode == 0, result.stderr


def launch_training(num: int, config: RunConfig, path: Path, launcher: Path = CPU) -> subprocess.CompletedProcess[str]:
    """Start a training run, which may fail, with the settings of `config`, which are put in a file at `path`."""
    path.write_text(to_yaml(config))
    options = ("--config_file", str(launcher), "--num_processes", str(num))
    return launch(*options, "-m", "launch.train", str(path))
