"""Instances of environments, each with a thread that makes all of its calls, and a time limit for each call.

An instance is used for one completion after another. If a call does not end in time, the instance is lost, and another
one is made. Its thread cannot be stopped, but its process can, if it has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from rl_vlm.data.video.frames import FrameRule
from rl_vlm.rollout.environments.contract import EnvironmentKind, read_start, with_frames
from rl_vlm.rollout.environments.hosts import Host, QueuedCall, Read, Use
from rl_vlm.rollout.environments.steps import read_reset, read_step, step_with_frames
from rl_vlm.rollout.environments.threads import CallThread

CLOSE_SECONDS = 10.0
"""Seconds for the methods `close` of all instances at the end of a run."""


class Instance:
    """An instance of an environment, or none for tools without an environment, and its thread."""

    def __init__(
        self, kind: EnvironmentKind | None, host: Host | None = None, thread: CallThread | None = None
    ) -> None:  # fmt: skip
        """`host` is the host of an instance that `thread` has made. Otherwise the first call makes one."""
        self.kind = kind
        self.host = kind.make() if host is None and kind is not None else host
        self.thread = CallThread() if thread is None else thread
        self.is_abandoned = False
        """True if a call has not ended in time."""

    @property
    def is_lost(self) -> bool:
        """Return whether it can be used no more: a call has not ended in time, or its process has ended."""
        return self.is_abandoned or (self.host is not None and self.host.has_ended)

    @property
    def environment(self) -> Any:
        """Return the environment, if it was made in this process."""
        return None if self.host is None else self.host.environment

    def call(self, function: Callable[[], Any], read: Read | None = None, complete: Read | None = None) -> QueuedCall:
        """Queue a call of a function that belongs to no environment."""
        return self.put(QueuedCall(function, read, complete=complete))

    def use(self, use: Use, read: Read | None = None, complete: Read | None = None) -> QueuedCall:
        """Queue a call of a function of the environment."""
        assert self.host is not None
        return self.put(self.host.queued(use, read, complete))

    def put(self, call: QueuedCall) -> QueuedCall:
        """Let the thread make a call after all earlier ones."""
        self.thread.put(call.run)
        return call

    def method(
        self, name: str, arguments: Mapping[str, Any], read: Read | None = None, complete: Read | None = None
    ) -> QueuedCall:
        """Queue a call of one of the environment's methods."""
        return self.use(methodcaller(name, **arguments), read, complete)

    def start(self, arguments: Mapping[str, Any], max_image_pixels: int, rule: FrameRule) -> list[QueuedCall]:
        """Queue `reset`, and `system_prompt` if there is one. Each returns content, or None.

        `rule` chooses the frames of clips.
        """
        assert self.kind is not None
        read = partial(read_reset if self.kind.takes_steps else read_start, max_image_pixels=max_image_pixels)
        complete = partial(with_frames, rule=rule)
        calls = [self.method("reset", arguments, read, complete)]
        if self.kind.takes_steps and self.kind.has_method("system_prompt"):
            read = partial(read_reset, max_image_pixels=max_image_pixels)
            calls.append(self.method("system_prompt", {}, read, complete))
        return calls

    def step(self, text: str, max_image_pixels: int, rule: FrameRule) -> QueuedCall:
        """Queue a step, which returns a `Step`. `rule` chooses the frames of clips."""
        read = partial(read_step, max_image_pixels=max_image_pixels)
        return self.use(methodcaller("step", text), read, partial(step_with_frames, rule=rule))

    def finish(self, call: QueuedCall, timeout: float) -> Any:
        """Wait for a call. Raises ToolFailure if it fails. If it has not ended, the instance is lost."""
        try:
            return call.result(timeout)
        finally:
            self.is_abandoned = self.is_abandoned or not call.future.done()

    def drop(self, calls: Sequence[QueuedCall]) -> None:
        """Cancel calls that have not begun. If one still runs, the instance is lost."""
        running = [call for call in calls if not call.future.cancel() and not call.future.done()]
        self.is_abandoned = self.is_abandoned or bool(running)

    def wait(self, seconds: float) -> None:
        """Wait until the thread has ended after `close`, if it can end. End the process, if there is one."""
        if not self.is_abandoned:
            self.thread.join(max(0.0, seconds))
        if self.host is not None:
            self.host.kill()

    def close(self) -> None:
        """End the thread after its last call, which closes the environment. If a call still runs, kill its process."""
        if self.host is not None and self.is_lost:
            self.host.kill()
        elif self.host is not None:
            self.put(self.host.closing())
        self.thread.end()


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
        for instance in [instance for instance in self.idle if instance.kind is kind]:
            self.idle.remove(instance)
            if not instance.is_lost:
                self.busy.append(instance)
                return instance
            instance.close()  # its process has ended since
        if kind is not None and self.max_num is not None and self.num_made() >= self.max_num:
            others = [instance for instance in self.idle if instance.kind is not None]
            if not others:
                return None
            self.idle.remove(others[0])
            others[0].close()
        is_first = kind is not None and id(kind) not in self.has_begun
        self.has_begun.add(id(kind))
        made = Instance(kind, kind.first, kind.thread) if kind is not None and is_first else Instance(kind)
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
