"""A process that runs one reward function and can be killed if it hangs.

If a function holds the interpreter lock, as a backtracking regular expression does, neither a thread nor a signal
handler can stop it. Killing its process can.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from rewards.calling import Call, describe
from rewards.contract import Answer, Fault, RewardFunction, failed, text_of

LOAD_SECONDS = 300.0
"""Time limit for each start of the process. It does not count towards the function's timeout."""

ENDING_SECONDS = 10.0
"""Time limit for a process to end after its connection is closed."""

MOST_RESTARTS = 3
"""Largest number of restarts after crashes in one call."""

Batch = tuple[Mapping[str, Any], int]
"""The arguments of one call, and its number of completions."""


class StartError(Exception):
    """Raised if a process could not start, or could not load its function."""


class Worker:
    """Runs a function in a process. The first call starts it, and a call restarts it if it was killed."""

    def __init__(self, load: Callable[[], RewardFunction], timeout: float) -> None:
        """`load` is called in the process and must be picklable."""
        self._load = load
        self._timeout = timeout
        self._process: BaseProcess | None = None
        self._connection: Connection
        self._is_closed = False

    def call(self, batches: Sequence[Batch]) -> list[Answer]:
        """Call the function once per batch, in order. All calls share `timeout` seconds, without the time to load it.

        When the time is up, the process is killed. Batches with an answer keep it, and the others fault. If the process
        crashes, the current batch faults, and a new process continues with the next. If it crashes again after
        `MOST_RESTARTS` restarts, the remaining batches fault too.
        """
        answers: list[Answer] = []
        self._is_closed = False
        left = self._timeout
        try:
            for _ in range(1 + MOST_RESTARTS):
                self._ensure_started()
                started = time.monotonic()
                if not self._answer(batches, answers, deadline=started + left):
                    left -= time.monotonic() - started
                    answers.append(failed(Fault("crash", self._ending()), batches[len(answers)][1]))
                if len(answers) == len(batches):
                    return answers
            fault = Fault("crash", f"not called: its worker process has ended {1 + MOST_RESTARTS} times in this call")
        except StartError as error:
            fault = Fault("load", f"its worker process could not load it: {error}")
        except TimeoutError:
            fault = Fault("timeout", f"took longer than {self._timeout:g} s and was killed")
        except BaseException as error:  # unpicklable arguments or logs; signals do not reach this thread
            fault = Fault("exception", f"its worker process could not be used: {describe(error)}")
        self._kill()
        return answers + [failed(fault, count) for _, count in batches[len(answers) :]]

    def _answer(self, batches: Sequence[Batch], answers: list[Answer], deadline: float) -> bool:
        """Add answers for the batches without one. Return False if the process ends before all have one."""
        rest = batches[len(answers) :]
        try:
            self._connection.send_bytes(pickle.dumps(rest))
            for _ in rest:
                answers.append(self._receive(deadline))
        except (EOFError, ConnectionError):
            return False
        return True

    def close(self) -> None:
        """Kill the process and all processes that the function started. A call in another thread ends."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        if self._process is None:
            return
        assert self._process.pid, "it was started"
        atexit.unregister(self.close)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._process = None

    def _ensure_started(self) -> None:
        """Start the process unless it runs. Raises StartError if it does not load the function in `LOAD_SECONDS`."""
        if self._is_closed:
            raise StartError("it was closed")
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, pickle.dumps(self._load)))
        process.start()
        theirs.close()
        self._process = process
        atexit.register(self.close)
        try:
            problem = self._receive(time.monotonic() + LOAD_SECONDS)
        except TimeoutError:
            problem = "it was not ready in time"
        except EOFError:
            problem = (
                f"{self._ending()} before that. It imports the script that you run: put the calls in it under "
                '`if __name__ == "__main__":`'
            )
        if problem:
            raise StartError(problem)

    def _receive(self, deadline: float) -> Any:
        if not self._connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            message = self._connection.recv_bytes()
        except OSError as error:  # the connection ended within a message
            raise EOFError from error
        return pickle.loads(message)

    def _ending(self) -> str:
        """Clean up a process that has ended, and return how it ended."""
        process = self._process
        assert process is not None
        process.join(timeout=ENDING_SECONDS)
        exit_code = process.exitcode
        self._kill()
        return f"its worker process ended with exit code {exit_code}"


def serve(connection: Connection, load: bytes) -> None:
    """Run the worker process: load the function, report a problem or None, then answer calls until the pipe closes.

    `load` is pickled, so that an error in unpickling is reported as well.
    """
    os.setsid()  # a new group, so that processes that the function starts are killed with it
    guard_process_group(connection)
    try:
        function = pickle.loads(load)()
    except BaseException as error:
        connection.send_bytes(pickle.dumps(text_of(error) or type(error).__name__))
        return
    connection.send_bytes(pickle.dumps(None))
    with contextlib.suppress(EOFError):
        while True:
            for arguments, count in pickle.loads(connection.recv_bytes()):
                with contextlib.chdir("."):
                    answer = Call(function, arguments, count).answer()
                connection.send_bytes(_pickled(answer, count))


def guard_process_group(connection: Connection) -> None:
    """Start a process that kills this process group once the worker or the main process has ended in any way.

    The worker cannot do this itself: it may have crashed, or its function may hold the interpreter lock.
    """
    group, main = os.getpid(), multiprocessing.parent_process()
    assert main is not None, "a worker is started by multiprocessing"
    worker_gone, held_by_worker = os.pipe()  # readable once the other end is closed
    if os.fork() == 0:
        os.close(held_by_worker)
        connection.close()  # otherwise the main process would not notice that the worker has ended
        wait([main.sentinel, worker_gone])
        os.killpg(group, signal.SIGKILL)  # this process included
    os.close(worker_gone)


def _pickled(answer: Answer, count: int) -> bytes:
    try:
        return pickle.dumps(answer)
    except BaseException as error:
        fault = Fault("type", f"logged something that cannot be sent to the main process: {text_of(error)}")
        return pickle.dumps(failed(fault, count))
