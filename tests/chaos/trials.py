"""The trials of the campaign: a run on two ranks that is killed, stopped or sent a signal, and resumed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rl_vlm.checkpoint import store
from rl_vlm.config.describe import to_yaml
from tests.chaos import rewards
from tests.chaos.launching import FORK, Launched, launch, preload, wait_until_dead
from tests.helpers.launching import environment_of
from tests.helpers.sharded_runs import launcher_file
from tests.helpers.tiny_run import build_checkpoint, completions, make_config, metric_lines
from tests.helpers.video_rows import write_mixed_rows

NUM_STEPS = 6
SHARDINGS = ("ddp", "fsdp2")
VICTIMS = ("rank 0", "rank 1", "all")
LOST_SECONDS = 5.0
"""`train.lost_rank_seconds` of the runs, the bound for a stopped rank."""
LIMIT = 120.0
"""Seconds after which a launch counts as one that does not end."""
ATTEMPTS = 8
"""Times that a moment is drawn, if the run has passed it already."""
MIXED = "SIGKILL with images, videos and text"
"""The kind whose runs have windows of two steps with video files, so that prompts with frames wait in checkpoints."""
KINDS: dict[str, int] = {
    "SIGKILL at a random moment": 50,
    "SIGKILL within a save": 50,
    "SIGTERM": 30,
    "SIGINT": 10,
    "one rank killed": 20,
    "one rank stopped": 10,
    MIXED: 10,
}
"""Kinds of trials, and how many there are of each."""
STATUSES = {"SIGTERM": 143, "SIGINT": 130}


class Missed(Exception):
    """The run had passed the moment at which something was to happen."""


@dataclass(frozen=True)
class Trial:
    """One trial, whose moments depend on its number within its kind alone."""

    kind: str
    number: int

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.number}"

    @property
    def sharding(self) -> str:
        return SHARDINGS[self.number % len(SHARDINGS)]

    @property
    def run(self) -> str:
        """The name of the golden run to which it is compared."""
        return f"{self.sharding}_mixed" if self.kind == MIXED else self.sharding

    @property
    def random(self) -> random.Random:
        return random.Random(self.key)


def all_trials() -> list[Trial]:
    """Return all trials. Kinds are mixed, so that the first ones are of every kind."""
    trials = [Trial(kind, number) for kind, count in KINDS.items() for number in range(count)]
    return sorted(trials, key=lambda trial: (trial.number + 0.5) / KINDS[trial.kind])


@dataclass(frozen=True)
class Setting:
    """The folder of the campaign, with the model and golden runs, to which nothing happened.

    There is one for each sharding, and one more with mixed data.
    """

    directory: Path

    def golden(self, run: str) -> Path:
        return self.directory / f"golden_{run}"

    def prepare(self, runs: Collection[str]) -> None:
        """Build the model, import what a run imports, and make the golden runs, unless they are there."""
        first = self.directory / "first"
        if not first.exists():
            builder = FORK.Process(target=build_checkpoint, args=(self.directory / "model",))
            builder.start()
            builder.join()
            self.train(SHARDINGS[-1], first)
        if not self.mixed_rows.exists():
            writer = FORK.Process(target=write_mixed_rows, args=(self.mixed_rows,))
            writer.start()
            writer.join()
        preload(first.with_suffix(".modules"))
        for run in sorted(runs):
            if not (self.golden(run) / "summary.json").exists():
                self.train(run, self.golden(run))

    @property
    def mixed_rows(self) -> Path:
        return self.directory / "mixed" / "train.jsonl"

    def train(self, name: str, run: Path) -> None:
        launched = self.launch(name, run)
        assert launched.wait(LIMIT) == 0, launched.log.read_text()

    def seconds(self, name: str) -> float:
        """Return what a golden run took."""
        started, ended = (self.golden(name).with_suffix(suffix).stat() for suffix in (".pids", ".statuses"))
        return ended.st_mtime - started.st_mtime

    def launch(self, name: str, run: Path, ends_others: bool = True, **settings: Any) -> Launched:
        """Start or resume a run like the golden one of this name."""
        given = {
            "prompts_per_step": 4, "max_steps": NUM_STEPS, "save_total_limit": 2, "lost_rank_seconds": LOST_SECONDS,
            "reward_funcs": [f"{rewards.__name__}:slowly"], "resume_from_checkpoint": "auto",
        }  # fmt: skip
        sharding, _, is_mixed = name.partition("_")
        if is_mixed:
            given |= {"dataset_name": str(self.mixed_rows), "num_frames": 4, "steps_per_generation": 2}
        config = run.with_suffix(".yaml")
        config.write_text(to_yaml(make_config(self.directory / "model", run, **(given | settings))))
        return launch(config, environment_of(launcher_file(sharding, self.directory)), ends_others)


def run_trial(setting: Setting, trial: Trial, run: Path) -> dict[str, Any]:
    """Disturb a run, resume it and compare it with the golden one. Returns what happened; raises AssertionError."""
    found = disturbed(setting, trial, run) | {"newest": newest_step(run)}
    resumed = setting.launch(trial.run, run)
    status = resumed.wait(LIMIT)
    assert status == 0, f"resumed run ended with {status}: {resumed.statuses()}"
    assert resumed.none_is_left()
    differing = differences(run, setting.golden(trial.run))
    assert not differing, f"differs in {', '.join(differing)}"
    return found


def disturbed(setting: Setting, trial: Trial, run: Path) -> dict[str, Any]:
    """Disturb a run, from its start again if it has passed the moment. Returns what happened."""
    draw = trial.random
    for attempt in range(1, ATTEMPTS + 1):
        remove(run)
        try:
            return DISTURB[trial.kind](setting, trial, run, draw) | {"attempts": attempt}
        except Missed:
            continue
    raise AssertionError(f"missed {ATTEMPTS} times")


def remove(run: Path) -> None:
    """Remove a run's directory and the files beside it."""
    shutil.rmtree(run, ignore_errors=True)
    for file in run.parent.glob(f"{run.name}.*"):
        file.unlink()


def newest_step(run: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    return max(map(store.step_of, store.complete(run)), default=0)


def differences(found: Path, expected: Path) -> list[str]:
    """Return in what two runs differ."""
    ours, theirs = (tensors(store.checkpoint_path(run, NUM_STEPS)) for run in (found, expected))
    equal = {
        "metrics": metric_lines(found) == metric_lines(expected),
        "completions": completions(found) == completions(expected),
        "tensors": ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours),
    }
    return [name for name, is_equal in equal.items() if not is_equal]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights and moments of a checkpoint."""
    return {name: value for path in sorted(directory.rglob("*.safetensors")) for name, value in load_file(path).items()}


def kill(launched: Launched, victim: str) -> None:
    """Kill one rank, or the launcher and both."""
    if victim == "all":
        launched.kill_all()
    else:
        os.kill(launched.ranks()[int(victim[-1])], signal.SIGKILL)


def check_ended(launched: Launched) -> None:
    """Check that a disturbed launch fails, and leaves no process behind.

    Raises Missed if both ranks had succeeded before they were disturbed.
    """
    status = launched.wait(LIMIT)
    try:
        if launched.statuses() == [0, 0]:
            raise Missed
        assert status, f"the launcher's status is {status}"
        assert launched.none_is_left(), "processes are left"
    finally:
        launched.kill_all()


def kill_at_random(setting: Setting, trial: Trial, run: Path, draw: random.Random) -> dict[str, Any]:
    """Kill at any moment from the fork of the ranks to the end of the run."""
    victim, moment = VICTIMS[trial.number // 2 % 3], draw.uniform(0, setting.seconds(trial.run))
    launched = setting.launch(trial.run, run)
    launched.ranks()
    if launched.wait(moment) is not None or launched.statuses():
        raise Missed
    kill(launched, victim)
    check_ended(launched)
    return {"victim": victim, "seconds": moment}


def kill_in_training(setting: Setting, trial: Trial, run: Path, draw: random.Random) -> dict[str, Any]:
    """Kill after a step, so that in half of the trials the newest checkpoint holds the rest of a window."""
    victim, lines, offset = VICTIMS[trial.number // 2 % 3], draw.randint(1, NUM_STEPS - 1), draw.uniform(0, 0.5)
    launched = setting.launch(trial.run, run)
    launched.ranks()
    wait_for_lines(launched, run, lines)
    if launched.wait(offset) is not None or launched.statuses():
        raise Missed
    kill(launched, victim)
    check_ended(launched)
    return {"victim": victim, "lines": lines, "offset": offset}


def kill_in_save(setting: Setting, trial: Trial, run: Path, draw: random.Random) -> dict[str, Any]:
    """Kill while the directory of an unfinished checkpoint is there."""
    victim, step, in_background = VICTIMS[trial.number // 2 % 3], draw.randint(1, NUM_STEPS), draw.random() < 0.5
    offset = draw.uniform(0, 0.25 if in_background else 0.04)
    launched = setting.launch(trial.run, run, async_save=in_background)
    launched.ranks()
    unfinished = store.unfinished_path(run, step)
    while not unfinished.exists():
        if not launched.process.is_alive():
            raise Missed
        time.sleep(0.0005)
    time.sleep(offset)
    if not unfinished.exists():
        launched.kill_all()
        raise Missed
    files = len(store.file_names(unfinished))
    kill(launched, victim)
    check_ended(launched)
    return {"victim": victim, "step": step, "offset": offset, "files": files, "in_background": in_background}


def send_signal(setting: Setting, trial: Trial, run: Path, draw: random.Random) -> dict[str, Any]:
    """Send one rank a signal between the first step and the fifth. Only the stop saves."""
    rank, lines, offset = draw.randrange(2), draw.randint(1, NUM_STEPS - 2), draw.uniform(0, 0.25)
    launched = setting.launch(trial.run, run, save_steps=0)
    pid = launched.ranks()[rank]
    wait_for_lines(launched, run, lines)
    time.sleep(offset)
    os.kill(pid, getattr(signal, trial.kind))
    begin = time.monotonic()
    check_ended(launched)
    seconds = time.monotonic() - begin
    assert launched.statuses() == [STATUSES[trial.kind]] * 2, f"statuses {launched.statuses()}"
    (saved,) = store.complete(run)
    assert store.step_of(store.check(saved)) == len(metric_lines(run))
    return {"victim": f"rank {rank}", "ended_after": seconds}


def wait_for_lines(launched: Launched, run: Path, lines: int) -> None:
    """Wait until so many steps are in the metrics."""
    path = run / "metrics.jsonl"
    while not (path.exists() and path.read_text().count("\n") >= lines):
        if not launched.process.is_alive():
            raise Missed
        time.sleep(0.005)


def lose_rank(setting: Setting, trial: Trial, run: Path, draw: random.Random) -> dict[str, Any]:
    """Kill or stop one rank. The launcher sends no signal: the other rank must end by itself, and name it."""
    rank, lines, offset = draw.randrange(2), draw.randint(1, NUM_STEPS - 2), draw.uniform(0, 0.25)
    is_killed = trial.kind == "one rank killed"
    launched = setting.launch(trial.run, run, ends_others=False)
    ranks = launched.ranks()
    wait_for_lines(launched, run, lines)
    time.sleep(offset)
    os.kill(ranks[rank], signal.SIGKILL if is_killed else signal.SIGSTOP)
    try:
        seconds = wait_until_dead(ranks[1 - rank], LIMIT)
        if not is_killed:
            os.kill(ranks[rank], signal.SIGKILL)  # as a launcher does in the end
        check_ended(launched)
    finally:
        launched.kill_all()
    log = launched.log.read_text()
    how = "died" if is_killed else f"gave .* for {LOST_SECONDS:g} s"
    assert re.search(rf"rank {rank} \(process {ranks[rank]} on \S+\) {how}", log), f"rank {rank} is not named"
    assert launched.statuses()[1 - rank] == 1, f"statuses {launched.statuses()}"
    return {"victim": f"rank {rank}", "ended_after": seconds}


DISTURB = {
    "SIGKILL at a random moment": kill_at_random,
    "SIGKILL within a save": kill_in_save,
    "SIGTERM": send_signal,
    "SIGINT": send_signal,
    "one rank killed": lose_rank,
    "one rank stopped": lose_rank,
    MIXED: kill_in_training,
}
