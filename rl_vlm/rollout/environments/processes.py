"""Environments in separate processes: a crash, a leak or a hang ends one process and nothing else.

    instance's thread ── request: function of the environment, reader ──────► process
                      ◄── reply: what the reader returned, or a failure ──

Requests are pickled. Replies are JSON, followed by images as files: nothing that an environment sends is unpickled.
The process imports torch only if the environment does.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from threading import Lock
from typing import Any

from rewards.calling import describe
from rewards.process import LOAD_SECONDS, Answerer, IsolatedProcess, StartError
from rl_vlm.data.video.shown import ShownClip
from rl_vlm.functions import live
from rl_vlm.rollout.environments.contract import Content, Description, Step, load_environment
from rl_vlm.rollout.environments.failures import ToolFailure
from rl_vlm.rollout.environments.hosts import Host, InThread, QueuedCall, Read, Use, close_environment, failure_of

CLOSE_SECONDS = 10.0
"""Time limit for the method `close`."""
LARGEST_REPLY = 256 * 2**20
"""Most bytes that a call may return, texts and images together."""
LENGTH_BYTES = 8
"""Bytes of the length of the JSON text at the head of a reply."""
SENT = {kind.__name__: kind for kind in (Content, Step, Description, ShownClip)}
"""Types that replies can hold, apart from those of JSON."""


class InProcess(Host):
    """A host in a process, which the first call starts. The process can be killed during a call."""

    def __init__(self, load: Callable[[], Answerer], max_bytes: int | None, limit: str) -> None:
        """`load` returns the process's answers. `limit` names the setting that bounds the memory."""
        self.load = load
        self.max_bytes = max_bytes
        self.limit = limit
        self.process: IsolatedProcess | None = None
        self.failure: ToolFailure | None = None
        """Why the process can answer no more calls."""
        self.lock = Lock()

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended after it was started."""
        return self.failure is not None or (self.process is not None and not self.process.is_running)

    def start(self) -> None:
        """Start the process unless it was started. Raises ToolFailure if it does not load the environment."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            if self.process is not None:
                return
            try:
                self.process = process = IsolatedProcess(self.load, self.max_bytes)
            except (OSError, RuntimeError) as error:  # the machine has no more; a script without a guard runs again
                self.failure = ToolFailure("crash", f"its process could not be started: {describe(error)}")
                raise self.failure from error
        try:
            process.wait_until_loaded()
        except StartError as error:
            self.failure = ToolFailure("crash", f"its process could not load it: {error}")
            self.kill()
            raise self.failure from error

    def queued(self, use: Use, read: Read | None = None, complete: Read | None = None) -> QueuedCall:
        """Return a call of a function of the environment. The time to start the process does not count."""
        answer = partial(self.answer, use, read)
        return QueuedCall(answer, prepare=self.start, patience=LOAD_SECONDS, complete=complete)

    def answer(self, use: Use, read: Read | None, deadline: float | None = None) -> Any:
        """Let the process call a function, and return the value. Raises ToolFailure if that or the process fails."""
        if self.failure is not None or self.process is None:
            raise self.failure or ToolFailure("crash", "its process was ended")
        process = self.process
        try:
            request = pickle.dumps((use, read))
        except Exception as error:  # columns can hold anything
            raise ToolFailure("exception", f"its process cannot get the arguments: {describe(error)}") from error
        try:
            process.send(request)
            reply = process.receive(deadline, LARGEST_REPLY)
        except EOFError as error:
            self.failure = self.failure_of(process)
            raise self.failure from error
        return unpacked(reply)

    def failure_of(self, process: IsolatedProcess) -> ToolFailure:
        """Describe the ending of the process."""
        ending = process.ending()
        if ending.used_bytes is not None:
            used = f"{ending.used_bytes / 2**30:.2f} GiB"
            return ToolFailure("memory", f"its process used {used}, more than {self.limit}, and was killed")
        return ToolFailure("crash", f"its process {ending}")

    def closing(self) -> QueuedCall:
        """Return a call of `close`, after which the process is killed."""
        return QueuedCall(self.close)

    def close(self) -> None:
        """Close the environment, in at most `CLOSE_SECONDS`, and end the process."""
        try:
            if self.process is not None and not self.has_ended:
                self.answer(close_environment, nothing, time.monotonic() + CLOSE_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        with self.lock:
            self.failure = self.failure or ToolFailure("crash", "its process was ended")
            process = self.process
        if process is not None:
            process.kill()


class Answers:
    """Answers the requests of one instance, in its process."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.host = InThread(factory)
        self.runner = asyncio.Runner()

    def __call__(self, request: bytes) -> Iterator[bytes]:
        """Yield the reply to a request."""
        try:
            use, read = pickle.loads(request)
        except BaseException as error:  # a class that only the main process has
            yield packed_failure(failure_of(error))
            return
        call = self.host.queued(use, read)
        call.run(self.runner)
        try:
            reply = packed(call.future.result())
        except ToolFailure as failure:
            reply = packed_failure(failure)
        if len(reply) > LARGEST_REPLY:
            problem = f"the call returned {len(reply)} bytes, more than {LARGEST_REPLY}"
            reply = packed_failure(ToolFailure("exception", problem, problem))
        yield reply


def load_answers(source: str, arguments: Mapping[str, Any], objects: Mapping[str, Callable[..., Any]]) -> Answers:
    """Load an environment in its process. `objects` are the main process's objects that `source` may refer to."""
    import faulthandler

    faulthandler.enable()  # shows where the environment was if it crashes in C
    with live(objects):
        return Answers(partial(load_environment(source), **arguments))


def nothing(value: Any) -> None:
    """Drop the return value of a call."""


def packed(value: Any) -> bytes:
    """Pack a value that a reader returned."""
    files: list[bytes] = []
    text = json.dumps({"value": as_json(value, files), "lengths": [len(file) for file in files]}).encode()
    return b"".join([len(text).to_bytes(LENGTH_BYTES, "little"), text, *files])


def packed_failure(failure: ToolFailure) -> bytes:
    """Pack a failure."""
    text = json.dumps({"failure": [failure.kind, failure.message, failure.text], "lengths": []}).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def unpacked(reply: bytes) -> Any:
    """Return the value of a reply. Raises ToolFailure if it is a failure."""
    end = LENGTH_BYTES + int.from_bytes(reply[:LENGTH_BYTES], "little")
    found, files = json.loads(reply[LENGTH_BYTES:end]), []
    for length in found["lengths"]:
        files.append(reply[end : end + length])
        end += length
    if "failure" in found:
        raise ToolFailure(*found["failure"])
    return from_json(found["value"], files)


def as_json(value: Any, files: list[bytes]) -> Any:
    """Return a value as JSON can hold it. Bytes are added to `files`."""
    if type(value).__name__ in SENT:
        return {"type": type(value).__name__, "values": [as_json(item, files) for item in value]}
    if isinstance(value, tuple):
        return {"type": "tuple", "values": [as_json(item, files) for item in value]}
    if isinstance(value, bytes):
        files.append(value)
        return {"type": "file", "values": len(files) - 1}
    return {"type": "plain", "values": value}


def from_json(value: Any, files: list[bytes]) -> Any:
    """Return the value that `as_json` was given."""
    kind, values = value["type"], value["values"]
    if kind == "plain":
        return values
    if kind == "file":
        return files[values]
    items = [from_json(item, files) for item in values]
    return tuple(items) if kind == "tuple" else SENT[kind](*items)
