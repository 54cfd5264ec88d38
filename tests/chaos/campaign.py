"""Disturb runs on two ranks in hundreds of trials, and go on where the last part ended.

python -m tests.chaos.campaign                 as `make chaos` does: up to 50 minutes, then again until all is done
python -m tests.chaos.campaign --short         one or two trials of each kind, all in one part
python -m tests.chaos.campaign --kind KIND     the trials of one kind alone
python -m tests.chaos.campaign --table         print the table of docs/reliability.md
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.trials import KINDS, Setting, Trial, all_trials, remove, run_trial

SHORT = ("SIGKILL at a random moment", "SIGKILL within a save", "SIGTERM", "one rank killed")
"""Kinds of which the short campaign has two trials, one for each sharding; it has one of the others."""


def short_trials() -> list[Trial]:
    """Return the trials of the short campaign."""
    return [Trial(kind, number) for kind in KINDS for number in range(2 if kind in SHORT else 1)]


def read(state: Path) -> dict[str, dict[str, Any]]:
    """Return the trials that are done, by key."""
    lines = state.read_text().splitlines() if state.exists() else []
    return {line["trial"]: line for line in map(json.loads, lines)}


def run(trials: Sequence[Trial], state: Path, directory: Path, seconds: float) -> bool:
    """Run the trials that are not done, until the time is over. Returns whether all are done."""
    end = time.monotonic() + seconds
    setting = Setting(directory.resolve())
    setting.prepare({trial.run for trial in trials})
    done = read(state)
    for trial in trials:
        if trial.key in done:
            continue
        if time.monotonic() > end:
            print(f"{len(done)} of {len(trials)} trials are done; run it again to go on")
            return False
        done[trial.key] = line = {"trial": trial.key, "sharding": trial.sharding, **outcome(setting, trial)}
        with state.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    return True


def outcome(setting: Setting, trial: Trial) -> dict[str, Any]:
    """Run a trial, and return what happened with the failure, if there is one. The files of a failure are kept."""
    begin, name = time.monotonic(), trial.key.replace(" ", "_").replace(":", "_")
    run_directory = setting.directory / name
    try:
        found = run_trial(setting, trial, run_directory)
        remove(run_directory)
    except (AssertionError, TimeoutError) as error:
        found = {"failure": str(error)}
    return {**found, "trial_seconds": round(time.monotonic() - begin, 1)}


def failures(state: Path) -> list[dict[str, Any]]:
    return [line for line in read(state).values() if "failure" in line]


def table(state: Path) -> str:
    """Return the table of docs/reliability.md."""
    done = read(state).values()
    lines = ["| what happened | to be run | run | passed | others ended after, s (longest) |", "|---|---|---|---|---|"]
    for kind, count in KINDS.items():
        own = [line for line in done if line["trial"].rpartition(":")[0] == kind]
        passed = [line for line in own if "failure" not in line]
        longest = max((line.get("ended_after", 0.0) for line in passed), default=0.0)
        shown = f"{longest:.1f}" if longest else ""
        lines.append(f"| {kind} | {count} | {len(own)} | {len(passed)} | {shown} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path(".chaos.jsonl"), help="file of the trials that are done")
    parser.add_argument("--directory", type=Path, default=Path("runs/chaos"), help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=50, help="time after which no further trial begins")
    parser.add_argument("--short", action="store_true", help="run eleven trials only")
    parser.add_argument("--kind", choices=KINDS, help="run the trials of this kind only")
    parser.add_argument("--table", action="store_true", help="print the table instead")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    trials = [trial for trial in (short_trials() if args.short else all_trials()) if args.kind in (None, trial.kind)]
    if args.table or run(trials, args.state, args.directory, 60 * args.minutes):
        print(table(args.state))
    for line in failures(args.state):
        print(f"FAILED {line}", file=sys.stderr)
    return int(bool(failures(args.state)))


if __name__ == "__main__":
    sys.exit(main())
