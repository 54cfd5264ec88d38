"""How trajectories advance: in waves, or each on its own.

    waves           turns of all ─► calls of all ─► turns of all ─► …
    independently   a: turn ─► call ─► turn ─► …       b: turn ─► call ──────────► turn ─► …

A course is a generator that runs one completion. One thread resumes all courses. It waits for the first of many events
and not for a certain one, so a slow call holds up its own completion alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from rl_vlm.distributed.signals import WAIT_SECONDS, stop
from rl_vlm.rollout.engine import Session, Submitted
from rl_vlm.rollout.environments.hosts import QueuedCall
from rl_vlm.types import RolloutRequest

Steps = Iterator[QueuedCall | None]
"""Runs a completion. Yields a call that it waits for, or None if it waits for its next turn."""


class Course:
    """An unfinished completion. It waits for a call, a submitted turn, or its turn in a wave."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.call: QueuedCall | None = None
        self.turn: Submitted | None = None
        self.has_ended = False

    @property
    def waits_for_turn(self) -> bool:
        return self.call is None and not self.has_ended

    def waits_for(self, future: Future[Any]) -> bool:
        """Return whether it waits for this future, and not for a later one."""
        awaited = self.turn or self.call
        return awaited is not None and awaited.future is future

    def resume(self) -> None:
        """Go on until it waits again, or has ended."""
        self.turn = None
        try:
            self.call = next(self.steps)
        except StopIteration:
            self.call, self.has_ended = None, True


def settle(courses: Sequence[Course], timeout: float) -> None:
    """Resume courses until each has ended or waits for its turn. Calls run concurrently, for up to `timeout`
    seconds."""
    while waiting := [course for course in courses if course.call is not None]:
        for course in waiting:
            assert course.call is not None
            course.call.wait(timeout)
        for course in waiting:
            course.resume()


class Independent:
    """Courses that advance each on its own, with an engine that takes turns at any time."""

    def __init__(self, session: Session, clock: EngineClock, timeout: float) -> None:
        """`timeout` is the limit of a call in seconds."""
        self.session = session
        self.clock = clock
        self.timeout = timeout
        self.events: SimpleQueue[tuple[Course, Future[Any]]] = SimpleQueue()

    def resume(self, course: Course) -> None:
        """Resume a course. If it waits for its turn then, the turn must be submitted."""
        course.resume()
        if course.call is not None:
            self.watch(course, course.call.future)

    def submit(self, course: Course, request: RolloutRequest) -> None:
        """Submit the turn that a course waits for."""
        course.turn = self.session.submit(request)
        self.clock.begin_turn()
        course.turn.future.add_done_callback(lambda _: self.clock.end_turn())
        self.watch(course, course.turn.future)

    def watch(self, course: Course, future: Future[Any]) -> None:
        """Note when the future of a course is done."""
        future.add_done_callback(lambda done: self.events.put((course, done)))

    def ready(self, courses: Iterable[Course]) -> list[Course]:
        """Wait until courses can continue, and return them. A course can continue if its turn is sampled, or its call
        has ended or timed out."""
        while True:
            stop.check()
            left = {c: c.call.seconds_left(self.timeout) for c in courses if c.call is not None}
            late = [course for course, seconds in left.items() if seconds <= 0]
            seconds = 0.0 if late else min([WAIT_SECONDS, *left.values()])
            found = dict.fromkeys([*late, *self.new_events(seconds)])
            if found:
                return list(found)

    def new_events(self, seconds: float) -> Iterator[Course]:
        """Yield the courses with events. Wait for the first one for at most `seconds`."""
        try:
            while True:
                course, future = self.events.get(timeout=seconds) if seconds else self.events.get_nowait()
                seconds = 0.0
                if course.waits_for(future):  # a call that was too late may end later
                    yield course
        except Empty:
            return


class EngineClock:
    """Measures for how much of a rollout the engine has no turn to sample."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_turns = 0
        self.waits_since = 0.0
        self.waited = self.total = 0.0
        """Seconds in which the engine had no turn to sample, and seconds of the rollout."""

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Return the context of the rollout."""
        start = self.waits_since = time.monotonic()
        yield
        self.waited += time.monotonic() - self.waits_since
        self.total = time.monotonic() - start

    def begin_turn(self) -> None:
        """Note that the engine has one more turn to sample."""
        with self.lock:
            if not self.num_turns:
                self.waited += time.monotonic() - self.waits_since
            self.num_turns += 1

    def end_turn(self) -> None:
        """Note that the engine has sampled a turn. Any thread may call this."""
        with self.lock:
            self.num_turns -= 1
            self.waits_since = time.monotonic()

    @contextmanager
    def wave(self) -> Iterator[None]:
        """Return the context in which the engine samples a wave."""
        self.begin_turn()
        yield
        self.end_turn()
