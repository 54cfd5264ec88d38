"""Batches of requests that arrive one by one: one thread owns the engine, and any thread may wait for an answer.

submit ─ queue ─► take: all that wait, and what arrives within COLLECT_SECONDS ─► a batch per sampling ─► generate
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NoReturn

from rl_vlm.rollout.engine import RolloutEngine
from rl_vlm.types import Group, RolloutRequest, Sampling

logger = logging.getLogger(__name__)

COLLECT_SECONDS = 0.02
"""Seconds after the first request of a batch in which others can join it."""


class Stopping(Exception):
    """The endpoint stops before it has answered a request."""


@dataclass(frozen=True, eq=False)
class Queued:
    """One request, and where its group goes."""

    request: RolloutRequest
    sampling: Sampling
    answer: Future[Group] = field(default_factory=Future)


class Batches:
    """The requests that wait for an engine. Each gets a group or an exception, once."""

    def __init__(self, engine: RolloutEngine, max_num_seqs: int) -> None:
        """A batch with `max_num_seqs` completions or more waits for no further request."""
        self.engine = engine
        self.max_num_seqs = max_num_seqs
        self.waiting: queue.Queue[Queued] = queue.Queue()
        self.lock = threading.Lock()
        self.unanswered: set[Queued] = set()
        self.is_closed = False

    def submit(self, request: RolloutRequest, sampling: Sampling) -> Future[Group]:
        """Queue a request from any thread, and return its group as a future. Raises Stopping after `close`.

        A cancelled future leaves the queue.
        """
        job = Queued(request, sampling)
        with self.lock:
            if self.is_closed:
                raise Stopping
            self.unanswered.add(job)
        self.waiting.put(job)
        return job.answer

    def run(self) -> NoReturn:
        """Answer requests until an exception interrupts this thread, which alone uses the engine."""
        while True:
            by_sampling: dict[Sampling, list[Queued]] = {}
            for job in self.take():
                if job.answer.cancelled():
                    self.settle(job, Stopping())
                else:
                    by_sampling.setdefault(job.sampling, []).append(job)
            for jobs in by_sampling.values():
                self.generate(jobs)

    def take(self) -> list[Queued]:
        """Wait for a request, and return it with the rest of its batch, in order of arrival."""
        jobs = [self.waiting.get()]
        end = time.monotonic() + COLLECT_SECONDS
        while sum(job.sampling.num_generations for job in jobs) < self.max_num_seqs:
            try:
                jobs.append(self.waiting.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                break
        return jobs

    def generate(self, jobs: Sequence[Queued]) -> None:
        """Generate the groups of requests with equal sampling. If that fails, try each request alone."""
        try:
            groups = self.engine.generate([job.request for job in jobs], jobs[0].sampling)
        except Exception as error:
            if len(jobs) > 1:
                logger.warning("a batch of %d requests failed (%s); each is tried alone", len(jobs), error)
                for job in jobs:
                    self.generate([job])
            else:
                self.settle(jobs[0], error)
            return
        for job, group in zip(jobs, groups, strict=True):
            self.settle(job, group)

    def settle(self, job: Queued, outcome: Group | Exception) -> None:
        """Give a request its group or its exception, unless `close` has given it one or nobody waits any more."""
        with self.lock:
            if job not in self.unanswered:
                return
            self.unanswered.discard(job)
        if not job.answer.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            job.answer.set_exception(outcome)
        else:
            job.answer.set_result(outcome)

    def close(self) -> None:
        """Refuse new requests, and give Stopping to all that have no answer yet."""
        with self.lock:
            self.is_closed = True
            left = list(self.unanswered)
        for job in left:
            self.settle(job, Stopping())
