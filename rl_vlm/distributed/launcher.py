"""Launchers: checks of their variables, the end of ranks whose launcher is gone, and torchrun's time limit."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping

from rl_vlm.errors import LaunchError

LEAST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
"""Launch variables that are integers, with their minimum."""
LAST_PORT = 65535
COUNT_OF = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
"""Indices of a process. Each is below the number of processes in another variable."""
TOGETHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Launch variables that several processes need to find each other."""
HOW_TO_LAUNCH = "Start the processes with `accelerate launch`, which sets all of them, or unset them for one process"
SET_BY_LAUNCHERS = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
"""Environment variables of torchrun and of `accelerate launch`."""
INTERVAL = 1.0
TORCHRUN_SECONDS = 30.0
"""Default time that torchrun, and so `accelerate launch`, gives ranks to end after a signal."""

logger = logging.getLogger(__name__)


def check_numbers(environment: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError if a launch variable is not a number, or is out of range."""
    numbers = {name: environment[name] for name in LEAST if name in environment}
    if numbers.keys() == {"MASTER_PORT"}:  # set for another service; a single process does not use it
        return
    for name, text in numbers.items():
        is_number = text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= LEAST[name]
        if not is_number or (name == "MASTER_PORT" and int(text) > LAST_PORT):
            up_to = f" to {LAST_PORT}" if name == "MASTER_PORT" else ""
            raise LaunchError(
                f"the launch variable {name} is {text!r}: it must be a whole number from {LEAST[name]}{up_to}. "
                f"{HOW_TO_LAUNCH}"
            )
    for name, count in COUNT_OF.items():
        if name in numbers and count in numbers and int(numbers[name]) >= int(numbers[count]):
            raise LaunchError(
                f"the launch variable {name} is {numbers[name]}, but must be below {count}, which is {numbers[count]}. "
                f"{HOW_TO_LAUNCH}"
            )


def check_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError unless the launch variables describe a single process, or one of several."""
    check_numbers(environment)
    given = [name for name in (*TOGETHER, "LOCAL_RANK") if environment.get(name)]
    missing = [name for name in TOGETHER if name not in given]
    is_alone = environment.get("WORLD_SIZE", "1") == "1" and not {"RANK", "LOCAL_RANK"} & {*given}
    if missing and not is_alone:
        values = ", ".join(f"{name}={environment[name]}" for name in given)
        raise LaunchError(
            f"the launch variables are incomplete: {values} without {', '.join(missing)}. {HOW_TO_LAUNCH}"
        )


def is_one_of_several(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has started several processes, and told them how to find each other."""
    try:
        check_variables(environment)
    except LaunchError:
        return False
    return int(environment.get("WORLD_SIZE", "1")) > 1


def end_with_launcher() -> None:
    """Send this process SIGTERM when its launcher ends, even if the launcher is killed.

    Otherwise the ranks of a dead launcher would keep writing into a directory that a new run uses.
    """
    if any(name in os.environ for name in SET_BY_LAUNCHERS):
        threading.Thread(target=_watch, args=(os.getppid(),), name="launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)


def note_short_grace(grace_seconds: float) -> None:
    """Log a note if torchrun kills ranks before the grace period is over."""
    seconds = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_SECONDS))
    if "TORCHELASTIC_RUN_ID" in os.environ and seconds < grace_seconds:
        logger.info(
            "after SIGTERM the launcher kills processes that have not saved within %g s: for more, start it with "
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=%g", seconds, grace_seconds,
        )  # fmt: skip
