"""Hosts of environments: where instances run, and how they are called.

InThread     in this process; the thread of the instance makes the calls
InProcess    in a process of its own, see `processes.py`
"""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from rewards.calling import describe
from rewards.contract import FaultKind
from rl_vlm.distributed.signals import WAIT_SECONDS, stop
from rl_vlm.errors import text_of
from rl_vlm.rollout.environments.failures import ToolFailure, UnknownAction

Use = Callable[[Any], Any]
"""A function of an environment, such as a call of one of its methods."""
Read = Callable[[Any], Any]
"""Converts the value that a call has returned."""


class QueuedCall:
    """A call that runs in an instance's thread."""

    def __init__(
        self,
        function: Callable[[], Any],
        read: Read | None = None,
        prepare: Callable[[], None] | None = None,
        patience: float = 0.0,
        complete: Read | None = None,
    ) -> None:
        """`read` converts the returned value, in the same thread, so that later calls cannot change it. `complete`
        converts it further, in this process even if the function runs in another.

        `prepare` is called first. It may take `patience` seconds, which do not count as the call's.
        """
        self.function = function
        self.read = read
        self.complete = complete
        self.prepare = prepare
        self.patience = patience
        self.future: Future[Any] = Future()
        self.started: float | None = None
        self.awaited: float | None = None
        """Time from which somebody waits for it."""
        self.seconds = 0.0

    def run(self, runner: asyncio.Runner) -> None:
        """Call the function in this thread, unless the call was cancelled. `runner` runs async functions."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            if self.prepare is not None:
                self.prepare()
            self.started = time.monotonic()
            returned = self.function()
            if inspect.isawaitable(returned):
                returned = runner.run(awaited(returned))
            for convert in filter(None, (self.read, self.complete)):
                returned = convert(returned)
        except BaseException as error:  # a user's code can raise anything, and its thread goes on
            self.seconds = self.seconds_since_start()
            self.future.set_exception(failure_of(error))
        else:
            self.seconds = self.seconds_since_start()
            self.future.set_result(returned)

    def seconds_since_start(self) -> float:
        """Return the seconds since the function was called."""
        return 0.0 if self.started is None else time.monotonic() - self.started

    def seconds_left(self, timeout: float) -> float:
        """Return the seconds until `timeout` seconds after the start, or after the first look at a call that waits."""
        now = time.monotonic()
        self.awaited = self.awaited or now
        return (self.started or self.awaited + self.patience) + timeout - now

    def wait(self, timeout: float) -> None:
        """Wait until the call has ended, or until `timeout` seconds after the start."""
        while not self.future.done() and (left := self.seconds_left(timeout)) > 0:
            stop.check()
            wait([self.future], min(left, WAIT_SECONDS))

    def result(self, timeout: float) -> Any:
        """Wait for the result until `timeout` seconds after the start. Raises ToolFailure if the call fails."""
        self.wait(timeout)
        if not self.future.done():
            raise ToolFailure("timeout", f"no answer within {timeout:g} seconds (rollout.tool_timeout)")
        return self.future.result()


class Host(ABC):
    """The place of an instance. The first call makes it. All calls run in the thread of the instance."""

    environment: Any = None
    """The instance, if it was made in this process."""

    @property
    def has_ended(self) -> bool:
        """Return whether it can answer no more calls."""
        return False

    @abstractmethod
    def queued(self, use: Use, read: Read | None = None, complete: Read | None = None) -> QueuedCall:
        """Return a call of a function of the environment, whose value `read` converts. Both must be picklable.

        `complete` converts it further, in this process.
        """

    @abstractmethod
    def closing(self) -> QueuedCall:
        """Return the last call, which closes the environment if it was made and has a method `close`."""

    @abstractmethod
    def kill(self) -> None:
        """End the process of the instance, if it has one, with a call that runs. Any thread may do this."""


class InThread(Host):
    """A host in this process. A call that does not end cannot be stopped."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory

    def made(self) -> Any:
        """Return the environment. The first call in the thread makes it."""
        if self.environment is None:
            self.environment = self.factory()
        return self.environment

    def queued(self, use: Use, read: Read | None = None, complete: Read | None = None) -> QueuedCall:
        """Return a call of a function of the environment."""
        return QueuedCall(lambda: use(self.made()), read, complete=complete)

    def closing(self) -> QueuedCall:
        """Return a call of `close`."""
        return QueuedCall(partial(close_environment, self.environment))

    def kill(self) -> None:
        """Do nothing: the instance is left to its thread."""


def close_environment(environment: Any) -> Any:
    """Call the method `close`, if there is one. Return its value, which may be awaitable."""
    close = getattr(environment, "close", None)
    return close() if callable(close) else None


async def awaited(awaitable: Any) -> Any:
    """Await anything that can be awaited."""
    return await awaitable


def failure_of(error: BaseException) -> ToolFailure:
    """Describe an error of a user's code. Raises nothing, even if the error's `__str__` does."""
    if isinstance(error, ToolFailure):
        return error
    kinds: dict[type[BaseException], FaultKind] = {
        ConnectionError: "connection",
        TimeoutError: "timeout",
        UnknownAction: "action",
        BaseException: "exception",
    }
    kind: FaultKind = next(kind for of, kind in kinds.items() if isinstance(error, of))
    try:
        text = str(error)
    except BaseException:
        text = text_of(error)
    return ToolFailure(kind, describe(error), text)
