"""Batches of requests that arrive one by one: one thread owns the engine, and any thread may wait for an answer.

submit ─ waiting ─► take: all that wait, and what arrives within COLLECT_SECONDS ─► a batch per sampling ─► generate
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import NoReturn

from rl_vlm.rollout.engine import RolloutEngine
from rl_vlm.tools.serving.budget import NotInTime
from rl_vlm.types import Group, RolloutRequest, Sampling

logger = logging.getLogger(__name__)

COLLECT_SECONDS = 0.02
"""Seconds after the first request of a batch in which others can join it."""
WATCH_SECONDS = 1.0
"""Seconds between two looks at a client that waits for its group."""


class Stopping(Exception):
    """The endpoint stops before it has answered a request."""


@dataclass(frozen=True, eq=False)
class Queued:
    """One request, and where its group goes."""

    request: RolloutRequest
    sampling: Sampling
    answer: Future[Group]


class Batches:
    """The requests that wait for an engine. Each gets a group or an exception, once."""

    def __init__(self, engine: RolloutEngine, max_num_seqs: int) -> None:
        """A batch with `max_num_seqs` completions or more waits for no further request."""
        self.engine = engine
        self.max_num_seqs = max_num_seqs
        self.waiting: dict[Future[Group], Queued] = {}
        self.unanswered: set[Future[Group]] = set()
        self.changed = threading.Condition()
        self.is_closed = False

    def group(self, request: RolloutRequest, sampling: Sampling, end: float, is_gone: Callable[[], bool]) -> Group:
        """Queue a request from any thread, and wait for its group.

        Raises NotInTime after `end`, a time of `time.monotonic`, and ConnectionError once `is_gone`. The request then
        leaves the queue. Raises Stopping after `close`.
        """
        future = self.submit(request, sampling)
        try:
            while not future.done():
                if is_gone():
                    raise ConnectionError
                if (seconds := end - time.monotonic()) <= 0:
                    raise NotInTime
                wait([future], min(seconds, WATCH_SECONDS))
            return future.result()
        finally:
            future.cancel()
            del future  # an error of the engine has this frame in its traceback, and would hold itself

    def submit(self, request: RolloutRequest, sampling: Sampling) -> Future[Group]:
        """Queue a request from any thread, and return its group as a future. Raises Stopping after `close`.

        A cancelled future leaves the queue.
        """
        future: Future[Group] = Future()
        with self.changed:
            if self.is_closed:
                raise Stopping
            self.waiting[future] = Queued(request, sampling, future)
            self.unanswered.add(future)
            self.changed.notify_all()
        future.add_done_callback(self.forget)
        return future

    def forget(self, future: Future[Group]) -> None:
        """Drop a request that is answered or cancelled."""
        with self.changed:
            self.waiting.pop(future, None)
            self.unanswered.discard(future)

    def run(self) -> NoReturn:
        """Answer requests until an exception interrupts this thread, which alone uses the engine."""
        while True:
            for jobs in self.take():
                self.generate(jobs)

    def take(self) -> list[list[Queued]]:
        """Wait for a request, and return it with the rest of its batch by sampling, in order of arrival."""

        def is_full() -> bool:
            return sum(job.sampling.num_generations for job in self.waiting.values()) >= self.max_num_seqs

        by_sampling: dict[Sampling, list[Queued]] = {}
        num_completions = 0
        with self.changed:
            self.changed.wait_for(lambda: self.waiting)
            self.changed.wait_for(is_full, COLLECT_SECONDS)
            while self.waiting and num_completions < self.max_num_seqs:
                job = self.waiting.pop(next(iter(self.waiting)))
                by_sampling.setdefault(job.sampling, []).append(job)
                num_completions += job.sampling.num_generations
        return list(by_sampling.values())

    def generate(self, jobs: list[Queued]) -> None:
        """Generate the groups of requests with equal sampling. If that fails, try each request alone.

        Empties `jobs`: an error has this frame in its traceback, and would hold the requests that get it.
        """
        try:
            groups = self.engine.generate([job.request for job in jobs], jobs[0].sampling)
        except Exception as error:
            if len(jobs) == 1:
                self.settle(jobs.pop().answer, error)
            else:
                logger.warning("a batch of %d requests failed (%s); each is tried alone", len(jobs), str(error))
            while jobs:
                self.generate([jobs.pop(0)])
        else:
            for job, group in zip(jobs, groups, strict=True):
                self.settle(job.answer, group)
            jobs.clear()

    def settle(self, answer: Future[Group], outcome: Group | Exception) -> None:
        """Give a request its group or its exception, unless `close` has given it one or nobody waits any more."""
        with self.changed:
            if answer not in self.unanswered:
                return
            self.unanswered.discard(answer)
        if not answer.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def close(self) -> None:
        """Refuse new requests, and give Stopping to all that have no answer yet."""
        with self.changed:
            self.is_closed = True
            left = list(self.unanswered)
        for answer in left:
            self.settle(answer, Stopping())
