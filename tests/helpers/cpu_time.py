"""Bounds on CPU time that a busy machine keeps."""

import gc
import time
from collections.abc import Callable


def stays_within(seconds: float, call: Callable[[], object]) -> bool:
    """Tell whether one of three calls takes less CPU time of this process than `seconds`.

    No garbage is collected during a call: a whole collection takes seconds in a worker that has run thousands of tests.
    Other threads of the process are unlikely to be busy in all three calls.
    """
    gc.disable()
    try:
        for _ in range(3):
            started = time.process_time()
            call()
            if time.process_time() - started < seconds:
                return True
    finally:
        gc.enable()
    return False
