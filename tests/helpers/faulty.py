"""An environment that fails in every way that its turns name, and counts what is left of it."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
FAULTS = {
    "exit": "crash", "abort": "crash", "null": "crash", "kill": "crash", "leak": "memory", "child leaks": "memory",
    "hang": "timeout", "deaf": "timeout", "lock": "timeout", "children": "timeout", "stop": "timeout",
    "orphans": "crash", "flood": "exception", "raise": "exception", "exit python": "exception",
}  # fmt: skip
"""Kinds of the failures that a step ends with, by the text of the turn."""


class Faulty:
    """Counts turns. Each turn that names a fault has it."""

    def __init__(self, pids: str = "", always: str = "", odds: float = 0.0) -> None:
        """Add the process to the file `pids`, and later the ones that it starts.

        `always` is the fault of each turn. With `odds`, a turn has a random fault with this probability.
        """
        self.pids, self.always, self.odds = pids, always, odds
        self.note(os.getpid())

    def note(self, pid: int) -> None:
        if self.pids:
            with Path(self.pids).open("a") as file:
                file.write(f"{pid}\n")

    def reset(self, seed: int = 0, start: int = 0, **columns: Any) -> list[dict[str, Any]]:
        self.count = start
        if self.always:
            self.leave_processes()
        return [{"type": "text", "text": f"Start at {start}."}, {"type": "image", "image": self.picture()}]

    def picture(self) -> Image.Image:
        return Image.new("RGB", (56, 56), (self.count, 2 * self.count, 3 * self.count))

    def step(self, text: str) -> tuple[Any, float, bool, dict[str, Any]]:
        drawn = random.choice(list(FAULTS)) if random.random() < self.odds else text
        self.fail(self.always or drawn)
        self.count += 1
        shown = [{"type": "text", "text": f"{self.count} é"}, {"type": "image", "image": self.picture()}]
        return shown, self.count / 8, text == "end", {}

    async def get_reward(self) -> float:
        return float(self.count)

    def start_child(self, **settings: Any) -> None:
        self.note(subprocess.Popen(SLEEPER, **settings).pid)

    def fail(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        elif how == "abort":
            os.abort()
        elif how == "null":
            ctypes.string_at(0)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "leak":
            leak()
        elif how == "child leaks":
            code = "import tests.helpers.faulty as f; f.leak()"
            self.note((child := subprocess.Popen([sys.executable, "-c", code], start_new_session=True)).pid)
            child.wait()
        elif how == "hang":
            time.sleep(600)
        elif how == "deaf":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            ctypes.CDLL(None).sleep(600)
        elif how == "lock":
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how in ("children", "orphans"):
            self.leave_processes()
            if how == "orphans":
                os._exit(4)
            time.sleep(600)
        elif how == "flood":
            os.write(2, b"flood\n" * 1000)
            raise ValueError("flood" * 10**6)
        elif how == "raise":
            raise ValueError("no such move")
        elif how == "exit python":
            sys.exit(5)

    def leave_processes(self) -> None:
        """Start a process, one in its own session, and one whose parent ends."""
        self.start_child()
        self.start_child(start_new_session=True)
        if (child := os.fork()) == 0:
            os.setsid()
            if orphan := os.fork():
                self.note(orphan)
                os._exit(0)
            time.sleep(600)
        os.waitpid(child, 0)


class Modules:
    """Says which modules its process has imported."""

    def reset(self) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Say it.

        Args:
            text: Any text.
        """
        return " ".join(sys.modules), 0.0, True, {}


class Ends(Faulty):
    """Ends its process when it is made."""

    def __init__(self) -> None:
        os._exit(7)


def leak() -> None:
    """Use more and more memory."""
    held = []
    while True:
        held.append(bytearray(b"x") * 2**24)
        time.sleep(0.02)  # 0.8 GB per second: a supervisor on a busy machine looks late
