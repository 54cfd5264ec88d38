"""What launchers do to their ranks: the end of a rank whose launcher is gone, and the time that torchrun leaves."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

SET_BY_LAUNCHERS = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
"""Environment variables of torchrun and of `accelerate launch`."""
INTERVAL = 1.0
TORCHRUN_SECONDS = 30.0
"""Time after a signal in which torchrun, and with it `accelerate launch`, lets ranks end, by default."""

logger = logging.getLogger(__name__)


def end_with_launcher() -> None:
    """Send this process SIGTERM if the launcher that started it ends, even if that is killed.

    Ranks of a dead launcher would go on writing into a directory that a new run uses.
    """
    if any(name in os.environ for name in SET_BY_LAUNCHERS):
        threading.Thread(target=_watch, args=(os.getppid(),), name="launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)


def note_short_grace(grace_seconds: float) -> None:
    """Log that torchrun kills ranks before the grace period is over, if it does."""
    seconds = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_SECONDS))
    if "TORCHELASTIC_RUN_ID" in os.environ and seconds < grace_seconds:
        logger.info(
            "after SIGTERM the launcher kills processes that have not saved within %g s: for more, start it with "
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=%g", seconds, grace_seconds,
        )  # fmt: skip
