"""A process for a user's code. It answers requests, and can be killed with all processes that it has started.

The process starts from nothing, as with multiprocessing's `spawn`. It imports the main process's script only if it gets
an object of that script: scripts import torch, which takes seconds and 300 MB in each process.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_preparation_data, prepare
from typing import Any

from rewards.contract import text_of
from rewards.supervisor import Ending, become_worker

LOAD_SECONDS = 300.0
"""Time limit for a process to start and to load its code."""
ENDING_SECONDS = 10.0
"""Time limit for a process to end."""
OF_SCRIPT = ("init_main_from_name", "init_main_from_path", "sys_argv")
"""Facts that multiprocessing needs to import the main process's script."""

Answerer = Callable[[bytes], Iterator[bytes]]
"""Answers a request with one or more replies."""


class StartError(Exception):
    """Raised if a process could not start, or could not load its code."""


class IsolatedProcess:
    """A process that answers requests. It does not outlive this process, in whatever way that ends."""

    def __init__(self, load: Callable[[], Answerer], max_bytes: int | None = None) -> None:
        """Start the process, which calls `load`. That must be picklable.

        The process is killed if it and the processes that it starts use more memory than `max_bytes`.
        """
        facts = get_preparation_data("")
        self._load = pickle.dumps(({key: facts[key] for key in OF_SCRIPT if key in facts}, pickle.dumps(load)))
        self._connection, theirs = multiprocessing.Pipe()
        self._reports, reports = multiprocessing.Pipe(duplex=False)
        lifeline, held = os.pipe()
        passed = (theirs.fileno(), reports.fileno(), lifeline)
        code = f"import sys; sys.path[:] = {sys.path}; from rewards.process import serve; serve{(*passed, max_bytes)}"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # signals of a terminal go to the main process alone
            )
        except BaseException:
            os.close(held)
            raise
        finally:
            theirs.close()
            reports.close()
            os.close(lifeline)
        self._end = weakref.finalize(self, kill, self._process, held, os.getpid())
        atexit.register(self._end)

    def wait_until_loaded(self) -> None:
        """Wait until the process can answer. Raises StartError if it cannot, or not within `LOAD_SECONDS`."""
        try:
            self.send(self._load)
            problem = self.receive(time.monotonic() + LOAD_SECONDS).decode()
        except TimeoutError:
            problem = "it was not ready in time"
        except EOFError:
            problem = (
                f"it {self.ending()} before that. If it gets an object of the script that you run, it imports the "
                'script: put the calls in it under `if __name__ == "__main__":`'
            )
        if problem:
            raise StartError(problem)

    def send(self, request: bytes) -> None:
        """Send a request. Raises EOFError if the process has ended."""
        try:
            self._connection.send_bytes(request)
        except OSError as error:
            raise EOFError from error

    def receive(self, deadline: float | None = None, max_length: int | None = None) -> bytes:
        """Wait for a reply, until a time of the monotonic clock.

        Raises TimeoutError, and EOFError if the process has ended, or if the reply has more bytes than `max_length`.
        """
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            has_reply = self._connection.poll(left)
            reply = self._connection.recv_bytes(max_length) if has_reply else None
        except OSError as error:  # the connection ended within a message
            raise EOFError from error
        if reply is None:
            raise TimeoutError
        return reply

    def ending(self) -> Ending:
        """Wait until the process has ended, kill it if it does not, and return how it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        self.kill()
        with suppress(EOFError, OSError):
            if self._reports.poll():
                return Ending(*json.loads(self._reports.recv_bytes()))
        return Ending(self._process.returncode)

    @property
    def is_running(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process and all processes that it has started. Any thread may do this."""
        atexit.unregister(self._end)
        self._end()


def kill(process: subprocess.Popen[bytes], held: int, parent: int) -> None:
    """Let a supervisor kill its worker and all processes of that, and wait for it. Do nothing in a fork of `parent`.

    The supervisor reads the other end of `held`.
    """
    if os.getpid() != parent:
        return
    process.terminate()
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    os.close(held)


def serve(connection_fd: int, reports_fd: int, lifeline: int, max_bytes: int | None) -> None:
    """Run the process: load its code, report a problem or none, then answer requests until the connection closes."""
    for passed in (connection_fd, reports_fd, lifeline):
        os.set_inheritable(passed, False)  # programs that the code starts
    connection, reports = Connection(connection_fd), Connection(reports_fd, readable=False)
    become_worker(lifeline, reports, connection, max_bytes)
    with suppress(EOFError):
        script, load = pickle.loads(connection.recv_bytes())
        try:
            answer: Answerer = Loader(script, load).load()()
        except BaseException as error:
            connection.send_bytes((text_of(error) or type(error).__name__).encode(errors="backslashreplace"))
            return
        connection.send_bytes(b"")
        while True:
            for reply in answer(connection.recv_bytes()):
                connection.send_bytes(reply)


class Loader(pickle.Unpickler):
    """Unpickles an object. If it refers to the main process's script, imports that."""

    def __init__(self, script: Mapping[str, Any], pickled: bytes) -> None:
        """`script` has the facts in `OF_SCRIPT`."""
        super().__init__(BytesIO(pickled))
        self.script = script

    def find_class(self, module: str, name: str) -> Any:
        """Return an object of a module."""
        if module == "__main__":
            current = multiprocessing.current_process()
            vars(current)["_inheriting"] = True  # as multiprocessing does; the script may ask
            try:
                prepare(dict(self.script))
            finally:
                del vars(current)["_inheriting"]
        return super().find_class(module, name)
