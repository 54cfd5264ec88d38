"""Two network namespaces as two machines, with the commands of `rl-vlm launch`: one is killed, the run continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import cli
from rl_vlm.config.describe import to_yaml
from tests.helpers import tiny_run
from tests.helpers.ending import MARK, none_is_left
from tests.helpers.tiny_run import completions, make_config, metric_lines, weights
from tests.helpers.two_processes import REPOSITORY, launch

pytestmark = pytest.mark.slow

HOSTS = {"rlvlm-a": "10.77.0.1", "rlvlm-b": "10.77.0.2"}
"""Addresses by namespace."""
NUM_STEPS = 6


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[None]:
    """Two namespaces with a wire between them."""
    try:
        for name in HOSTS:
            ip(f"netns add {name}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("link add rlvlm0 netns rlvlm-a type veth peer name rlvlm0 netns rlvlm-b")
        for name, address in HOSTS.items():
            ip(f"-n {name} addr add {address}/24 dev rlvlm0")
            ip(f"-n {name} link set rlvlm0 up")
            ip(f"-n {name} link set lo up")
        yield
    finally:
        for name in HOSTS:
            ip(f"netns del {name}")


def printed_commands(config: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what `rl-vlm launch` prints for each machine."""
    options = ["--nodes", "2", "--gpus", "1", "--sharding", "zero3", "--hosts", ",".join(HOSTS.values())]
    assert cli.main(["launch", config, *options]) == 0
    return capsys.readouterr().out.split("\n# On ")[1:]


def start(machine: str, commands: str, mark: str) -> subprocess.Popen[str]:
    """Run the commands of a machine in its namespace, on its CPU."""
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "rlvlm0", MARK: mark}
    # The commands need `accelerate`, also if .venv is not active.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = f"# {commands}"  # the rest of the comment that names the machine
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, "bash", "-c", commands], cwd=REPOSITORY, text=True, start_new_session=True,
        env=os.environ | variables | {"PYTHONPATH": str(REPOSITORY), "PATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def kill_machine(machine: str) -> None:
    """Kill every process of a namespace at once."""
    found = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def wait_for_steps(run: Path, number: int, processes: list[subprocess.Popen[str]]) -> None:
    lines, end = run / "metrics.jsonl", time.monotonic() + 400
    while not (lines.exists() and lines.read_text().count("\n") >= number):
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.05)


def write_config(directory: Path, model: Path) -> str:
    """Write the settings of a run in `directory`, and return the file's path."""
    path = directory.with_suffix(".yaml")
    config = make_config(
        model, directory, prompts_per_step=4, max_steps=NUM_STEPS, lost_rank_seconds=10.0,
        reward_funcs=[tiny_run.COIN, f"{__name__}:slow_sum"],
    )  # fmt: skip
    path.write_text(to_yaml(config))
    return str(path)


def slow_sum(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Score as `token_sum`, after a second in which a machine can be killed."""
    time.sleep(1.0)
    return tiny_run.token_sum(completion_ids)


def test_a_run_on_two_machines_continues_after_one_is_killed(machines, tiny_checkpoint, tmp_path, capsys):
    straight, run = tmp_path / "straight", tmp_path / "run"
    zero3 = ("--config_file", "launch/accelerate/zero3.yaml", "--num_processes", "2")
    done = launch(
        *zero3, "-m", "launch.train", write_config(straight, tiny_checkpoint), timeout=500,
        environment={"ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    commands = printed_commands(write_config(run, tiny_checkpoint), capsys)

    first = [start(machine, text, str(run)) for machine, text in zip(HOSTS, commands, strict=True)]
    wait_for_steps(run, 3, first)
    kill_machine("rlvlm-b")
    begin = time.monotonic()
    log, _ = first[0].communicate(timeout=120)
    seconds = time.monotonic() - begin
    first[1].communicate()
    assert first[0].returncode == 1 and "rank 1 (process" in log, log
    assert seconds < 60
    assert none_is_left(str(run))
    assert 3 <= len(metric_lines(run)) < NUM_STEPS

    again = [start(machine, text, str(run)) for machine, text in zip(HOSTS, commands, strict=True)]
    logs = [process.communicate(timeout=500)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], logs
    assert "resuming from checkpoint-" in logs[0]
    assert metric_lines(run) == metric_lines(straight)
    assert completions(run) == completions(straight)
    ours, theirs = (weights(directory / f"checkpoint-{NUM_STEPS}") for directory in (run, straight))
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    print(f"the other machine ended {seconds:.0f} s after the kill; {logs[0].count('resuming from')} resumed")
