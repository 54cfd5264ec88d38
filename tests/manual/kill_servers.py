"""Kill one vLLM server of a digits run, then stop the other, in each phase of a step, and see how the run takes it.

    python -m tests.manual.kill_servers [--runs 5] [KEY=VALUE ...]

The run goes on without the killed server (SIGKILL). The one that hangs (SIGSTOP) was the last: the run ends with status
2 and the server's address, leaves no process behind, and can be resumed from its last complete step. At the end the
trainer itself is killed, and its servers must end too. Prints a row per event, and ends with status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from examples.digits.digits import starting_model
from rl_vlm.checkpoint import store

CONFIG = "configs/digits.yaml"
PHASES = ("idle", "generating", "syncing")
UPDATES = 4
"""Optimizer steps of a generation window: in all but the first the servers are idle."""
START_SECONDS, LIMIT_SECONDS, ORPHAN_SECONDS = 600.0, 120.0, 30.0
SETTINGS = [
    "eval_dataset_name=null", "eval_steps=0", "save_steps=0", "max_steps=2000", "disable_tqdm=true",
    "prompts_per_step=16", "num_generations=8", f"num_iterations={UPDATES}", "vllm_max_model_length=64",
    f"vllm_server_timeout={START_SECONDS}",
]  # fmt: skip


class Wrong(Exception):
    """What a run did that it should not."""


class Run:
    """A training run and its servers, all processes of their own."""

    def __init__(self, output_dir: Path, settings: list[str]) -> None:
        self.output_dir, self.errors = output_dir, Path(f"{output_dir}.log")
        self.process = start(output_dir, [*settings, "rollout.engine=vllm_server", "vllm_num_servers=2"])
        try:
            self.wait_for(lambda: self.steps() > UPDATES, START_SECONDS)
        except Wrong:
            self.process.kill()
            raise
        children = psutil.Process(self.process.pid).children()
        self.servers = [child for child in children if "vllm.entrypoints.launchers.api_server.entry" in child.cmdline()]
        self.family = [p for server in self.servers for p in (server, *server.children(recursive=True))]

    def lines(self) -> list[str]:
        """Those of `metrics.jsonl`, one per step."""
        path = self.output_dir / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def steps(self) -> int:
        return len(self.lines())

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise Wrong(f"ended with status {self.process.returncode}, see {self.errors}")
            if time.monotonic() > deadline:
                raise Wrong(f"is at step {self.steps()} after {seconds:.0f} s, see {self.errors}")
            time.sleep(0.001)

    def wait_for_phase(self, phase: str) -> None:
        """Returns within the phase: when its weights lie ready, or they are gone and half a rollout's time is over."""
        weights = self.output_dir / "weight_sync"
        if phase == "idle":
            return self.wait_for(lambda: self.steps() % UPDATES == 2, LIMIT_SECONDS)
        generation = max(json.loads(line).get("time/generation", 0.0) for line in self.lines()[-UPDATES:])
        self.wait_for(weights.exists, LIMIT_SECONDS)
        if phase == "generating":
            self.wait_for(lambda: not weights.exists(), LIMIT_SECONDS)
            time.sleep(generation / 2)

    def survives(self, server: psutil.Process) -> float:
        """Kill a server; returns the seconds until a step is complete whose rollout was not before."""
        next_rollout = -(-self.steps() // UPDATES) * UPDATES + 1
        begin = time.monotonic()
        os.killpg(server.pid, signal.SIGKILL)
        self.wait_for(lambda: self.steps() >= next_rollout, LIMIT_SECONDS)
        return time.monotonic() - begin

    def ends_well(self, server: psutil.Process, settings: list[str]) -> float:
        """Stop the last server; returns the seconds until the run has ended as it should."""
        message = f"The vLLM server http://127.0.0.1:{port_of(server)} does not answer"
        begin = time.monotonic()
        os.killpg(server.pid, signal.SIGSTOP)
        try:
            status = self.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise Wrong(f"still runs after {LIMIT_SECONDS:.0f} s") from None
        seconds = time.monotonic() - begin
        last, saved = self.steps(), store.find("auto", self.output_dir)
        if status != 2 or message not in self.errors.read_text():
            raise Wrong(f"ended with status {status}, or without {message!r} in {self.errors}")
        if saved is None or store.step_of(saved) != last:
            raise Wrong(f"ended after step {last}, and its last checkpoint is {saved}")
        if self.running():
            raise Wrong(f"left processes {[p.pid for p in self.running()]}")
        resume = [*settings, "use_vllm=false", "resume_from_checkpoint=auto", f"max_steps={last + 1}"]
        if start(self.output_dir, resume).wait() != 0 or self.steps() != last + 1:
            raise Wrong(f"could not be resumed from {saved}, see {self.errors}")
        return seconds

    def dies_alone(self) -> float:
        """Kill the trainer; returns the seconds until its servers have ended."""
        self.process.kill()
        self.process.wait()
        begin = time.monotonic()
        while self.running():
            if time.monotonic() - begin > ORPHAN_SECONDS:
                raise Wrong(f"left processes {[p.pid for p in self.running()]}")
            time.sleep(0.1)
        return time.monotonic() - begin

    def running(self) -> list[psutil.Process]:
        """What still runs of the servers that the run had."""
        return [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def clean_up(self) -> None:
        for process in (self.process, *self.running()):
            process.kill()


def start(output_dir: Path, settings: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launch.train", CONFIG, *settings, f"output_dir={output_dir}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=open(f"{output_dir}.log", "ab"))


def port_of(server: psutil.Process) -> str:
    words = server.cmdline()
    return words[words.index("--port") + 1]


def report(run: int, event: str, phase: str, good: str, cause: Callable[..., float], *arguments: Any) -> bool:
    """Cause an event and print its row; returns whether the run took it as it should."""
    try:
        text = f"{good} after {cause(*arguments):.0f} s"
    except Wrong as wrong:
        text = f"WRONG: {wrong}"
    print(f"{run:3}  {event:15}  {phase:10}  {text}", flush=True)
    return not text.startswith("WRONG")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("runs/kill_servers"))
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the run")
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    model = options.directory / "initial_model"
    starting_model(model, 0)
    settings = [f"model_name_or_path={model}", *SETTINGS, *options.overrides]

    results = []
    print(f"{'run':>3}  {'event':15}  {'phase':10}  outcome", flush=True)
    for i in range(options.runs):
        run, killed_in, stopped_in = Run(options.directory / str(i), settings), PHASES[i % 3], PHASES[(i + 1) % 3]
        first, second = run.servers
        run.wait_for_phase(killed_in)
        results.append(report(i, "server killed", killed_in, "went on", run.survives, first))
        run.wait_for_phase(stopped_in)
        results.append(report(i, "server stopped", stopped_in, "ended", run.ends_well, second, settings))
        run.clean_up()
    run = Run(options.directory / "trainer", settings)
    results.append(report(options.runs, "trainer killed", "any", "no server left", run.dies_alone))
    run.clean_up()
    print(f"\n{sum(results)} of {len(results)} as they should")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
