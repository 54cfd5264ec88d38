"""A process that runs one reward function and can be killed if it hangs.

If a function holds the interpreter lock, as a backtracking regular expression does, neither a thread nor a signal
handler can stop it. Killing its process can.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from functools import partial
from typing import Any

from rewards.calling import Call, describe
from rewards.contract import Answer, Fault, RewardFunction, failed, text_of
from rewards.process import Answerer, IsolatedProcess, StartError

MOST_RESTARTS = 3
"""Largest number of restarts after crashes in one call."""

Batch = tuple[Mapping[str, Any], int]
"""The arguments of one call, and its number of completions."""


class Worker:
    """Runs a function in a process. The first call starts it, and a call restarts it if it was killed."""

    def __init__(self, load: Callable[[], RewardFunction], timeout: float) -> None:
        """`load` is called in the process and must be picklable."""
        self._load = load
        self._timeout = timeout
        self._process: IsolatedProcess | None = None
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
                process = self._started()
                started = time.monotonic()
                if not self._answer(process, batches, answers, deadline=started + left):
                    left -= time.monotonic() - started
                    fault = Fault("crash", f"its worker process {process.ending()}")
                    answers.append(failed(fault, batches[len(answers)][1]))
                    self._kill()
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

    def _answer(
        self, process: IsolatedProcess, batches: Sequence[Batch], answers: list[Answer], deadline: float
    ) -> bool:
        """Add answers for the batches without one. Return False if the process ends before all have one."""
        rest = batches[len(answers) :]
        try:
            process.send(pickle.dumps(rest))
            for _ in rest:
                answers.append(pickle.loads(process.receive(deadline)))
        except EOFError:
            return False
        return True

    def close(self) -> None:
        """Kill the process and all processes that the function started. A call in another thread ends."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _started(self) -> IsolatedProcess:
        """Return the process. Start it unless it runs. Raises StartError if it cannot load the function."""
        if self._is_closed:
            raise StartError("it was closed")
        if self._process is None:
            self._process = process = IsolatedProcess(partial(load_answers, self._load))
            process.wait_until_loaded()
        return self._process


def load_answers(load: Callable[[], RewardFunction]) -> Answerer:
    """Load a function, in the process, and return a function that answers batches with it."""
    return partial(answers_of, load())


def answers_of(function: RewardFunction, request: bytes) -> Iterator[bytes]:
    """Yield a pickled answer for each batch of a pickled list."""
    for arguments, count in pickle.loads(request):
        with chdir("."):
            answer = Call(function, arguments, count).answer()
        yield _pickled(answer, count)


def _pickled(answer: Answer, count: int) -> bytes:
    try:
        return pickle.dumps(answer)
    except BaseException as error:
        fault = Fault("type", f"logged something that cannot be sent to the main process: {text_of(error)}")
        return pickle.dumps(failed(fault, count))
