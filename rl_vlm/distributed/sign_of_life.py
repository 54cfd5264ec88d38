"""The main thread's sign of life: its position, and the time since it last was alive."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rl_vlm.stages import Listener, Stage

NUM_FRAMES = 12
"""Innermost frames of a position: enough to reach this project's frames through torch's."""

_last_mark = time.monotonic()


def mark_alive() -> None:
    """Note a sign of life. Also call this while the run waits for something slow: it is not stuck."""
    global _last_mark
    _last_mark = time.monotonic()


class SignOfLife(Listener):
    """Gives a sign of life as each stage and each item of work begins."""

    def stage(self, stage: Stage) -> AbstractContextManager[Any]:
        mark_alive()
        return nullcontext()

    def work(self, work: Any) -> AbstractContextManager[Any]:
        mark_alive()
        return nullcontext()


def seconds_without_sign() -> float:
    """Return the seconds since the last `mark_alive`."""
    return time.monotonic() - _last_mark


def position() -> str:
    """Return the main thread's innermost frames, one per line, the innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    walked = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=NUM_FRAMES, lookup_lines=False)
    return "\n".join(f"  {entry.filename}:{entry.lineno} in {entry.name}" for entry in reversed(walked))
