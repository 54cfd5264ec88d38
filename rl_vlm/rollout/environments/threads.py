"""A thread that makes all calls of an instance.

Some objects, such as connections of sqlite3, can be used only in the thread that made them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any


class CallThread:
    """A thread that runs calls in their order. It is started with the first one."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[asyncio.Runner], Any] | None] = SimpleQueue()
        self.thread: Thread | None = None

    def serve(self) -> None:
        """Run calls until `end`."""
        with asyncio.Runner() as runner:
            while (call := self.calls.get()) is not None:
                call(runner)
                del call  # while it waits, the thread keeps no instance alive

    def put(self, call: Callable[[asyncio.Runner], Any]) -> None:
        """Queue a call, which must raise nothing. Its argument runs async functions."""
        if self.thread is None:
            self.thread = Thread(target=self.serve, name="environment", daemon=True)
            self.thread.start()
        self.calls.put(call)

    def end(self) -> None:
        """End the thread after its last call."""
        self.calls.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended after `end`."""
        if self.thread is not None:
            self.thread.join(seconds)
