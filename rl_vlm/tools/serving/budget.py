"""An amount that all requests share, such as the bytes of their bodies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Units that threads take and give back. A thread takes all it needs at once, so that none waits for another."""

    def __init__(self, total: int) -> None:
        self.total = self.left = total
        self.changed = threading.Condition()

    def take(self, amount: int, seconds: float) -> bool:
        """Take units, and return whether there were enough of them within `seconds`."""
        with self.changed:
            has_enough = self.changed.wait_for(lambda: amount <= self.left, seconds)
            self.left -= amount if has_enough else 0
        return has_enough

    def give(self, amount: int) -> None:
        """Give units back."""
        with self.changed:
            self.left += amount
            self.changed.notify_all()

    @contextmanager
    def held(self, amount: int, seconds: float) -> Iterator[None]:
        """Hold units during the block. Raises NotInTime if others do not leave enough of them within `seconds`."""
        if not self.take(amount, seconds):
            raise NotInTime
        try:
            yield
        finally:
            self.give(amount)


class NotInTime(Exception):
    """A request was not answered within its time."""
