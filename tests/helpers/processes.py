"""Processes, by their entries in `/proc`."""

import time
from pathlib import Path


def is_gone(pid: int) -> bool:
    """Return whether a process has ended. Wait a little for it."""
    for _ in range(200):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False
