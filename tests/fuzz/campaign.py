"""Fuzz reward functions in parts, and resume where the last part ended.

python -m tests.fuzz.campaign                 as `make fuzz` does: up to 50 minutes, then again until all is done
python -m tests.fuzz.campaign --table         print the table of docs/reliability.md
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from rewards.registry import ASKS_A_MODEL, BUILT_INS
from tests.fuzz.asked import check_asked
from tests.fuzz.completions import BATCH, check_batch
from tests.fuzz.outputs import cases, check_case, make_groups, make_suite

OUTPUTS, COMPLETIONS = 100_000, 50_000
OUTPUTS_PER_PART, BATCHES_PER_PART = 1000, 125
EVERYTHING = "anything returned"
ALL_CHECKS: list[Any] = list(HealthCheck)


def targets() -> dict[str, int]:
    """Return the number of parts of each target: returned values of functions, and every built-in."""
    parts = -(-COMPLETIONS // (BATCH * BATCHES_PER_PART))
    return {EVERYTHING: OUTPUTS // OUTPUTS_PER_PART} | dict.fromkeys(BUILT_INS, parts)


def run_outputs(part: int, count: int = OUTPUTS_PER_PART) -> dict[str, Any]:
    """Fuzz what functions return: `count` cases that depend on the part's number alone."""
    groups, found = make_groups(), Counter()
    with make_suite() as suite:

        @seed(part)
        @settings(max_examples=count, database=None, deadline=None, suppress_health_check=ALL_CHECKS)
        @given(cases)
        def check(case: Any) -> None:
            found[check_case(suite, groups, case)] += 1

        check()
    return {"cases": sum(found.values()), "faults": dict(found)}


def run_built_in(name: str, part: int, count: int = BATCHES_PER_PART) -> dict[str, Any]:
    """Fuzz a built-in with `count` batches of completions."""
    check = check_asked if name in ASKS_A_MODEL else check_batch
    slowest = max(check(name, part * BATCHES_PER_PART + i) for i in range(count))
    return {"cases": count * BATCH, "slowest": slowest}


def run_part(target: str, part: int) -> dict[str, Any]:
    return run_outputs(part) if target == EVERYTHING else run_built_in(target, part)


def run(state: Path, seconds: float) -> bool:
    """Run the parts that are not done, until the time is over. Returns whether all are done."""
    done: dict[str, dict[str, Any]] = json.loads(state.read_text()) if state.exists() else {}
    end = time.monotonic() + seconds
    for target, number in targets().items():
        for part in range(number):
            key = f"{target}:{part}"
            if key in done:
                continue
            if time.monotonic() > end:
                print(f"{len(done)} of {sum(targets().values())} parts are done; run it again to go on")
                return False
            done[key] = run_part(target, part)
            state.write_text(json.dumps(done))
        print(f"{target}: {number} parts done", flush=True)
    return True


def table(state: Path) -> str:
    """Return the table of docs/reliability.md."""
    done = json.loads(state.read_text())
    lines = ["| target | cases | slowest call of 8, s |", "|---|---|---|"]
    for target in targets():
        parts = [found for key, found in done.items() if key.rpartition(":")[0] == target]
        slowest = max((found.get("slowest", 0.0) for found in parts), default=0.0)
        shown = f"{slowest:.2f}" if slowest else ""
        lines.append(f"| {target} | {sum(found['cases'] for found in parts):,} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path(".fuzz.json"), help="file of the parts that are done")
    parser.add_argument("--minutes", type=float, default=50, help="time after which no further part begins")
    parser.add_argument("--table", action="store_true", help="print the table instead")
    args = parser.parse_args()
    if args.table or run(args.state, 60 * args.minutes):
        print(table(args.state))


if __name__ == "__main__":
    main()
