"""Instances of environments, each with a thread that makes all of its calls, and a time limit for each call.

An instance is used for one completion after another. If a call does not end in time, its thread cannot be stopped: the
instance is left to it, and another one is made.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rewards.calling import describe
from rl_vlm.distributed.signals import WAIT_SECONDS, stop
from rl_vlm.rollout.environments.contract import EnvironmentKind

CLOSE_SECONDS = 10.0
"""Seconds for the methods `close` of all instances at the end of a run."""


class ToolFailure(Exception):
    """A call that failed. `kind` names the fault: `timeout`, `connection` or `exception`."""

    def __init__(self, kind: str, message: str, text: str = "") -> None:
        """`text` is the exception's own text."""
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.text = text


class QueuedCall:
    """A call that runs in an instance's thread."""

    def __init__(self, function: Callable[[], Any], read: Callable[[Any], Any] | None = None) -> None:
        """`read` converts the returned value, in the same thread, so that later calls cannot change it."""
        self.function = function
        self.read = read
        self.future: Future[Any] = Future()
        self.started: float | None = None
        self.seconds = 0.0

    def run(self, runner: asyncio.Runner) -> None:
        """Call the function in this thread, unless the call was cancelled. `runner` runs async functions."""
        if not self.future.set_running_or_notify_cancel():
            return
        self.started = time.monotonic()
        try:
            returned = self.function()
            if inspect.isawaitable(returned):
                returned = runner.run(awaited(returned))
            returned = returned if self.read is None else self.read(returned)
        except BaseException as error:  # a user's code can raise anything, and its thread goes on
            self.seconds = time.monotonic() - self.started
            self.future.set_exception(failure_of(error))
        else:
            self.seconds = time.monotonic() - self.started
            self.future.set_result(returned)

    def result(self, timeout: float) -> Any:
        """Wait for the result until `timeout` seconds after the start. Raises ToolFailure if the call fails."""
        waiting_since = time.monotonic()
        while not self.future.done():
            stop.check()
            left = (self.started or waiting_since) + timeout - time.monotonic()
            if left <= 0:
                raise ToolFailure("timeout", f"no answer within {timeout:g} seconds (rollout.tool_timeout)")
            wait([self.future], min(left, WAIT_SECONDS))
        return self.future.result()


class Instance:
    """An instance of an environment, or none for tools without an environment, and its thread."""

    def __init__(self, kind: EnvironmentKind | None, environment: Any = None) -> None:
        """`environment` is an instance that has been made. Otherwise the first call makes one, in the thread."""
        self.kind = kind
        self.environment = environment
        self.is_lost = False
        """True if a call has not ended in time."""
        self.calls: SimpleQueue[QueuedCall | None] = SimpleQueue()
        self.thread: Thread | None = None
        """Started with the first call."""

    def serve(self) -> None:
        """Run calls in their order, until `close`."""
        with asyncio.Runner() as runner:
            while (call := self.calls.get()) is not None:
                call.run(runner)

    def call(self, function: Callable[[], Any], read: Callable[[Any], Any] | None = None) -> QueuedCall:
        """Queue a call."""
        if self.thread is None:
            self.thread = Thread(target=self.serve, name="environment", daemon=True)
            self.thread.start()
        call = QueuedCall(function, read)
        self.calls.put(call)
        return call

    def method(self, name: str, arguments: Mapping[str, Any], read: Callable[[Any], Any] | None = None) -> QueuedCall:
        """Queue a call of one of the environment's methods."""
        return self.call(partial(self.call_method, name, arguments), read)

    def call_method(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method, in the thread of the instance."""
        if self.environment is None:
            assert self.kind is not None
            self.environment = self.kind.factory()
        return getattr(self.environment, name)(**arguments)

    def finish(self, call: QueuedCall, timeout: float) -> Any:
        """Wait for a call. Raises ToolFailure if it fails. If it has not ended, the instance is lost."""
        try:
            return call.result(timeout)
        finally:
            self.is_lost = self.is_lost or not call.future.done()

    def drop(self, calls: Sequence[QueuedCall]) -> None:
        """Cancel calls that have not begun. If one still runs, the instance is lost."""
        running = [call for call in calls if not call.future.cancel() and not call.future.done()]
        self.is_lost = self.is_lost or bool(running)

    def wait(self, seconds: float) -> None:
        """Wait until the thread has ended after `close`, if it can end."""
        if self.thread is not None and not self.is_lost:
            self.thread.join(max(0.0, seconds))

    def close(self) -> None:
        """End the thread after its last call, which closes the environment if it has a method `close`."""
        close = getattr(self.environment, "close", None)
        if callable(close) and not self.is_lost:
            self.call(close)
        self.calls.put(None)


class Instances:
    """The instances of one process."""

    def __init__(self, max_num: int | None = None) -> None:
        """`max_num` is the largest number of instances with an environment. None means no limit."""
        self.max_num = max_num
        self.idle: list[Instance] = []
        self.busy: list[Instance] = []
        self.has_begun: set[int] = set()
        """Kinds whose first instance is in use."""

    def acquire(self, kind: EnvironmentKind | None) -> Instance | None:
        """Return an instance that no completion uses, or None if there must not be more."""
        for instance in self.idle:
            if instance.kind is kind:
                self.idle.remove(instance)
                self.busy.append(instance)
                return instance
        if kind is not None and self.max_num is not None and self.num_made() >= self.max_num:
            others = [instance for instance in self.idle if instance.kind is not None]
            if not others:
                return None
            self.idle.remove(others[0])
            others[0].close()
        first = None if kind is None or id(kind) in self.has_begun else kind.first
        self.has_begun.add(id(kind))
        made = Instance(kind, first)
        self.busy.append(made)
        return made

    def num_made(self) -> int:
        """Return the number of instances with an environment."""
        return sum(instance.kind is not None for instance in (*self.idle, *self.busy))

    def release(self, instance: Instance) -> None:
        """Make an instance free for other completions. A lost one is replaced when it is needed."""
        self.busy.remove(instance)
        if instance.is_lost:
            instance.close()
        else:
            self.idle.append(instance)

    def close(self) -> None:
        """Close all instances, and wait for them for at most `CLOSE_SECONDS`."""
        instances, deadline = (*self.idle, *self.busy), time.monotonic() + CLOSE_SECONDS
        self.idle, self.busy = [], []
        for instance in instances:
            instance.close()
        for instance in instances:
            instance.wait(deadline - time.monotonic())


async def awaited(awaitable: Any) -> Any:
    """Await anything that can be awaited."""
    return await awaitable


def failure_of(error: BaseException) -> ToolFailure:
    """Describe an error of a user's code."""
    if isinstance(error, ToolFailure):
        return error
    kind = "connection" if isinstance(error, ConnectionError) else "timeout" if isinstance(error, TimeoutError) else ""
    return ToolFailure(kind or "exception", describe(error), str(error))
