"""Ways in which one process of a run ends, and what is left of it.

accelerate launch ... -m tests.helpers.ending RUN.yaml     a run whose second process raises KeyError in its third step
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.tiny_run import token_sum

MARK = "RL_VLM_TEST_RUN"
"""Environment variable by which the processes of a launch are found."""
SLOW_SECONDS = 30.0


def signal_itself(
    completion_ids: list[list[int]], trainer_state: Any, *, number: int, rank: int, done: str
) -> list[float]:
    """Score as `token_sum`, and once, in the third step of a rank, send this process a signal."""
    if trainer_state.global_step == 2 and os.environ["RANK"] == str(rank) and not Path(done).exists():
        Path(done).touch()
        time.sleep(1.5)  # until a beat has shown this place
        os.kill(os.getpid(), number)
        time.sleep(0.5)  # until the thread that reads signals has noted it
    return token_sum(completion_ids)


def slow(completion_ids: list[list[int]], trainer_state: Any) -> list[float]:
    """Score as `token_sum`, after half a minute in the first step of the second rank."""
    if trainer_state.global_step == 0 and trainer_state.max_steps and os.environ["RANK"] == "1":
        time.sleep(SLOW_SECONDS)
    return token_sum(completion_ids)


def processes_of(mark: str, session: int | None = None) -> list[psutil.Process]:
    """Return the processes that were started with this value of MARK, or are of this session."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getsid(process.pid) == session or process.environ().get(MARK) == mark:
                found.append(process)
    return found


def none_is_left(mark: str, seconds: float = 30.0, session: int | None = None) -> bool:
    """Wait until none of `processes_of` is left, and return whether that is so."""
    end = time.monotonic() + seconds
    while processes_of(mark, session):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def main() -> int:
    from launch import cli
    from rl_vlm.trainer import Trainer

    update = Trainer.update

    def failing(trainer: Trainer, *arguments: Any) -> None:
        if trainer.progress.global_step == 2 and os.environ["RANK"] == "1":
            raise KeyError("a bug of the trainer")
        update(trainer, *arguments)

    Trainer.update = failing  # pyright: ignore[reportAttributeAccessIssue]
    return cli.run("train", sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
