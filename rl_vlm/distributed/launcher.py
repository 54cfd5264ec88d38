"""The end of a rank whose launcher is gone."""

from __future__ import annotations

import os
import signal
import threading
import time

SET_BY_LAUNCHERS = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
"""Environment variables of torchrun and of `accelerate launch`."""
INTERVAL = 1.0


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
