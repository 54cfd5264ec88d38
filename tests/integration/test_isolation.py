"""Environments in processes within runs: nothing is lost, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RolloutConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import ConfigError
from rl_vlm.rollout.environments.loading import load_toolbox
from rl_vlm.run.run import train
from tests.helpers import tiny_run
from tests.helpers.calling import NUM_LOOKS, SHADES, calling_checkpoint
from tests.helpers.ending import MARK, none_is_left, processes_of
from tests.helpers.faulty import FAULTS
from tests.helpers.resuming import assert_same_run
from tests.helpers.templates import builder_of
from tests.unit.rollout.environments.test_driver import Run

ROOT = Path(__file__).parents[2]
FAULTY = "tests.helpers.faulty:Faulty"
MEMORY, MIB = 256, 2**20
NUM_INSTANCES = 4
TURNS: dict[str, Any] = {
    "environment": SHADES, "reward_funcs": [NUM_LOOKS], "num_generations": 6, "max_completion_length": 220,
    "max_turns": 4, "environment_isolation": "process", "max_environments": NUM_INSTANCES,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Other tests of this process may have left some."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calling_checkpoint(tmp_path_factory.mktemp("calling"))


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    return builder_of("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


def test_a_run_is_the_one_with_threads(checkpoint: Path, tmp_path: Path) -> None:
    settings = {**TURNS, "max_steps": 1, "num_generations": 4, "prompts_per_step": 1}
    for isolation in ("thread", "process"):
        settings["environment_isolation"] = isolation
        train(tiny_run.make_config(checkpoint, tmp_path / isolation, **settings))
    assert_same_run(tmp_path / "process", tmp_path / "thread", last=1)


def reads_environments(environments: list[Any], **columns: Any) -> list[float]:
    return [0.0 for _ in environments]


def test_reward_functions_cannot_have_the_instances(checkpoint: Path, tmp_path: Path) -> None:
    settings = {**TURNS, "max_environments": None, "reward_funcs": [f"{__name__}:reads_environments"]}
    with pytest.raises(ConfigError, match="environment_isolation is process, and a reward function names"):
        train(tiny_run.make_config(checkpoint, tmp_path / "run", **settings))


def descendants() -> dict[int, psutil.Process]:
    return {process.pid: process for process in psutil.Process().children(recursive=True)}


@dataclass
class Watched:
    """Measures the memory of this process's new descendants while it runs. Earlier ones are of other tests."""

    peak: int = 0
    """Bytes of all processes at once."""
    peak_of_one: int = 0
    peak_here: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)
    earlier: frozenset[int] = field(default_factory=lambda: frozenset(descendants()))

    def watch(self) -> None:
        main = psutil.Process()
        while not self.is_over.wait(0.1):
            found = []
            for pid, process in descendants().items():
                if pid in self.earlier:
                    continue
                with suppress(psutil.Error):
                    found.append(process.memory_full_info().pss)
            self.peak, self.peak_of_one = max(self.peak, sum(found)), max([self.peak_of_one, *found])
            self.peak_here = max(self.peak_here, main.memory_info().rss)


@pytest.mark.parametrize("num_faults", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_random_faults_lose_no_other_completion(builder: PromptBuilder, num_faults: int, tmp_path: Path) -> None:
    """Half of the completions have a fault, after as many good turns as chance decides."""
    draw = random.Random(num_faults)
    hows = [draw.choice(list(FAULTS)) if draw.random() < 0.5 else "end" for _ in range(2 * num_faults)]
    hows += [draw.choice(list(FAULTS)) for _ in range(num_faults - sum(how != "end" for how in hows))]
    before = [draw.randrange(3) for _ in hows]
    settings = {"environment_kwargs": {"pids": str(tmp_path / "pids")}, "environment_memory": f"{MEMORY}MiB"}
    settings |= {"environment_protocol": "steps", "environment_isolation": "process"}
    watched = Watched()
    thread = threading.Thread(target=watched.watch)
    thread.start()
    here, started = psutil.Process().memory_info().rss, time.monotonic()
    try:
        run = Run(
            builder, lambda index, turn: hows[index] if turn == before[index] else "go",
            load_toolbox(RolloutConfig(environment=FAULTY, **settings)), num=len(hows), max_num=NUM_INSTANCES,
            tool_timeout=15.0, masks_errors=True,
        )  # fmt: skip
        run.trajectories.close()
    finally:
        watched.is_over.set()
        thread.join()
    completions = run.groups[0].completions
    found = [c.fault.kind if c.fault else c.finish_reason for c in completions]
    expected = [FAULTS.get(how, "stop") for how in hows]
    lost = [pair for pair in zip(hows, found, expected, strict=True) if pair[1] != pair[2]]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    print(
        f"{len(hows)} completions, {sum(how != 'end' for how in hows)} faults, {len(lost)} lost {lost}, "
        f"{len(pids)} processes, {len(left)} left, peak {watched.peak / MIB:.0f} MiB of all, "
        f"{watched.peak_of_one / MIB:.0f} MiB of one, limit {MEMORY} MiB each; this process from {here / MIB:.0f} to "
        f"{watched.peak_here / MIB:.0f} MiB; {time.monotonic() - started:.0f} s"
    )
    assert lost == [] and left == []
    rewards = [c.environment_reward for c, how in zip(completions, hows, strict=True) if how == "end"]
    assert rewards == [count + 1.0 for count, how in zip(before, hows, strict=True) if how == "end"]
    assert watched.peak < NUM_INSTANCES * 1.5 * MEMORY * MIB


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 10])
def test_a_run_goes_on_after_faults(checkpoint: Path, num_steps: int, tmp_path: Path) -> None:
    """An eighth of the turns have a random fault, so that about 20 of 48 completions of a step have one."""
    kwargs = {"pids": str(tmp_path / "pids"), "odds": 0.125}
    settings = {
        **TURNS, "environment": FAULTY, "environment_protocol": "steps", "environment_kwargs": kwargs,
        "environment_memory": f"{MEMORY}MiB", "max_steps": num_steps, "num_generations": 12, "tool_timeout": 6.0,
        "prompts_per_step": 4, "max_environments": 2 * NUM_INSTANCES,
        "tool_errors": "mask", "max_fault_fraction": 1.0, "save_steps": num_steps,
    }  # fmt: skip
    started = time.monotonic()
    summary = train(tiny_run.make_config(checkpoint, tmp_path / "run", **settings))
    rows = [row for rows in tiny_run.completions(tmp_path / "run").values() for row in rows]
    faults = Counter((row["fault"] or "none").removeprefix("environment/").partition(":")[0] for row in rows)
    num_processes = len((tmp_path / "pids").read_text().split())
    print(f"{len(rows)} completions, {dict(faults)}, {num_processes} processes, {time.monotonic() - started:.0f} s")
    assert len(rows) == 48 * num_steps and sum(summary["reward_faults"].values()) == len(rows) - faults["none"]
    assert faults.keys() <= {"none", *FAULTS.values()} and 12 * num_steps < faults["none"] < 44 * num_steps


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param("SIGKILL", -9, marks=pytest.mark.slow),
        ("SIGTERM", 143),
        pytest.param("SIGINT", 130, marks=pytest.mark.slow),
    ],
)
def test_no_process_is_left_of_a_run_that_a_signal_ends(
    number: str, status: int, checkpoint: Path, tmp_path: Path
) -> None:
    """Environments have started processes, also in sessions of their own, and hang in C with signals ignored."""
    kwargs = {"pids": str(tmp_path / "pids"), "always": "deaf"}
    settings = {**TURNS, "environment": FAULTY, "environment_protocol": "steps", "environment_kwargs": kwargs}
    (tmp_path / "run.yaml").write_text(to_yaml(tiny_run.make_config(checkpoint, tmp_path / "run", **settings)))
    run = subprocess.Popen(
        [sys.executable, "-c", "from launch.cli import command; command()", "train", str(tmp_path / "run.yaml")],
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 4 * NUM_INSTANCES:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    assert len(processes_of(str(tmp_path))) >= 1 + 5 * NUM_INSTANCES  # with a supervisor for each
    run.send_signal(signal.Signals[number])
    assert run.wait(60) == status
    assert none_is_left(str(tmp_path), 10.0)


SCRIPT = """
from rl_vlm.config.schema import RolloutConfig
from rl_vlm.functions import live
from rl_vlm.rollout.environments.loading import load_toolbox

class Own:
    def reset(self): ...

    def go(self, where: str) -> str:
        \"\"\"Go.

        Args:
            where: The place.
        \"\"\"

def main():
    settings = {"environment": "python:Own#1", "environment_isolation": "process"}
    with live({"python:Own#1": Own}):
        print(load_toolbox(RolloutConfig(**settings)).kinds[None].tools)

"""


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ('if __name__ == "__main__": main()', "['go']"),
        ("main()", "attempt has been made to start a new process before"),
    ],
)
def test_a_class_of_the_script_that_runs(end: str, found: str, tmp_path: Path) -> None:
    """The process imports the script, since the class is in it. A script without a guard is an error."""
    (tmp_path / "script.py").write_text(SCRIPT + end)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found in ran.stdout + ran.stderr and (ran.returncode == 0) == (found in ran.stdout)
