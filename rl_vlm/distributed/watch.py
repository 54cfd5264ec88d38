"""Ranks watch each other. If a rank dies or hangs, the run ends soon, and the message names the rank.

    rank 0 ── beat each second ──► store ──► ranks 1 and N-1 read it          (each rank reads its two neighbours)
    rank 0 ◄── "stop", "failed" ── store ◄── any rank that got a signal, failed, or found a neighbour lost

The store is the launcher's, where the ranks meet. Threads do the watching, because the main thread may be in a
collective, which ends only at its time-out.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch.distributed import DistNetworkError, DistStoreError

from rl_vlm.distributed.launcher import is_one_of_several
from rl_vlm.distributed.meeting_point import connect
from rl_vlm.distributed.sign_of_life import mark_alive, position, seconds_without_sign
from rl_vlm.distributed.signals import end_process, stop
from rl_vlm.errors import RankLost, RLVLMError, Stopped

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between beats."""
RAISE_SECONDS = 5.0
"""Time in which the main thread must raise and close after a verdict."""
LEAVE_SECONDS = 15.0
"""Time to wait for the other ranks to finish as well."""
OF_COLLECTIVES = re.compile(r"gloo|NCCL|DistBackendError|[Cc]onnection (closed|reset) by")
"""Text of errors that the end of another rank may cause."""


@runtime_checkable
class Store(Protocol):
    """The methods of torch's stores that are used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


@dataclass(frozen=True)
class Beat:
    """The state that a rank reports each second."""

    number: int
    host: str
    """Host name and PID namespace: processes of equal hosts see each other."""
    pid: int
    idle_seconds: float
    """Seconds without progress."""
    position: str
    """Innermost frames of the main thread."""
    has_left: bool = False

    @classmethod
    def now(cls, number: int, has_left: bool = False) -> Beat:
        return cls(number, this_host(), os.getpid(), seconds_without_sign(), position(), has_left)

    @property
    def process(self) -> str:
        return f"process {self.pid} on {self.host.partition(' ')[0]}"


@dataclass
class Neighbour:
    """The last known state of a watched rank."""

    rank: int
    beat: Beat | None = None
    last_seen: float = 0.0

    def hear(self, beat: Beat, now: float) -> None:
        """Note the last beat, unless it is known already."""
        if self.beat is None or beat.number != self.beat.number:
            self.beat, self.last_seen = beat, now

    def loss(self, now: float, lost_seconds: float) -> str | None:
        """Describe how the rank was lost. Return None if it was not."""
        beat = self.beat
        if beat is None or beat.has_left:
            return None
        if beat.host == this_host() and not is_alive(beat.pid):
            found = "died"
        elif now - self.last_seen > lost_seconds:
            found = f"gave no sign of life for {lost_seconds:g} s (train.lost_rank_seconds): it died, or was stopped"
        else:
            return None
        return f"rank {self.rank} ({beat.process}) {found}. Its main thread was last at\n{beat.position}"

    def absence(self, now: float, hang_seconds: float) -> str | None:
        """Describe a rank that sends no beat within `hang_seconds`, or return None. Ranks may start far apart."""
        if self.beat is not None or now <= hang_seconds:
            return None
        return f"rank {self.rank} has not started within {hang_seconds:g} s (train.ddp_timeout)"

    def hangs(self, hang_seconds: float) -> bool:
        """Return whether the rank makes no progress."""
        return self.beat is not None and not self.beat.has_left and self.beat.idle_seconds > hang_seconds


class Watch:
    """Watches from one rank: sends beats, reads its neighbours' beats, and ends this process if a rank is lost.

    `failure` is the verdict on the lost rank.
    """

    def __init__(
        self, store: Store, meeting_store: Store, rank: int, world_size: int, lost_seconds: float, hang_seconds: float
    ) -> None:
        """Each store belongs to one thread: `store` to the watching thread, `meeting_store` to the main thread."""
        self.store = store
        self.meeting_store = meeting_store
        self.rank = rank
        self.world_size = world_size
        self.lost_seconds = lost_seconds
        self.hang_seconds = hang_seconds
        self.failure: str | None = None
        self.has_joined = False
        self.has_heard_of_stop = False
        self.has_failed = False
        """Whether this rank has shown the others its own error."""
        self.meetings = itertools.count()
        self.beats = itertools.count()
        self.neighbours = [Neighbour(r) for r in sorted({(rank - 1) % world_size, (rank + 1) % world_size})]
        self.awake = 0.0
        """Seconds since the start, without the time in which a scheduler, for instance, suspended this process."""
        self.last_contact = 0.0
        self.is_leaving = threading.Event()
        self.threads = [
            threading.Thread(target=target, name=f"watch-{target.__name__}", daemon=True)
            for target in (self.watch, self.guard)
        ]

    def start(self) -> Watch:
        """Start to watch."""
        mark_alive()
        for thread in self.threads:
            thread.start()
        return self

    # In threads

    def watch(self) -> None:
        """Exchange beats at once and then each second, until this rank leaves or a rank is lost."""
        while self.failure is None:
            with suppress(DistNetworkError, DistStoreError):  # which `guard` notices
                self.exchange()
                self.last_contact = self.awake
            if self.is_leaving.wait(INTERVAL):
                return

    def guard(self) -> None:
        """End this process after a verdict, or if the store is gone, even if the main thread or `watch` is stuck."""
        last = time.monotonic()
        while self.failure is None and not self.is_leaving.wait(INTERVAL):
            now = time.monotonic()
            self.awake, last = self.awake + min(now - last, 2 * INTERVAL), now
            if self.awake - self.last_contact > self.lost_seconds and stop.signum is None:
                self.failure = (
                    f"the launcher's store was not reached for {self.lost_seconds:g} s (train.lost_rank_seconds): the "
                    "launcher or the machine of rank 0 is gone"
                )
        if self.failure is not None and not self.has_failed and not self.is_leaving.wait(RAISE_SECONDS):
            end_process(1, f"rank {self.rank} ends: {self.failure}\n{HOW_TO_CONTINUE}")

    def exchange(self) -> None:
        """Beat once, and learn of stops, failures and lost neighbours."""
        self.store.set(f"beat/{self.rank}", json.dumps(vars(Beat.now(next(self.beats)))))
        if stop.signum is not None:
            self.publish_stop(self.store)
        elif self.store.check(["stop"]):
            self.hear_of_stop(self.store)
        if self.store.check(["failed"]):
            self.failure = self.store.get("failed").decode()
            return
        for neighbour in self.neighbours:
            self.look_at(neighbour)

    def publish_stop(self, store: Store) -> bytes:
        """Show all ranks this rank's signal, unless another rank was first. Return the first signal."""
        return store.compare_set("stop", "", f"{stop.signum} rank {self.rank} ({Beat.now(0).process})")

    def hear_of_stop(self, store: Store) -> int:
        """Ask this rank to stop because of another rank's signal, and return the signal."""
        signum, _, process = store.get("stop").decode().partition(" ")
        if not self.has_heard_of_stop:
            self.has_heard_of_stop = True
            absent = [f"rank {rank}" for rank in range(self.world_size) if not store.check([f"beat/{rank}"])]
            missing = f" ({', '.join(absent)} had not started)" if absent else ""
            logger.warning("%s was sent %s: all ranks stop%s", process, signal.Signals(int(signum)).name, missing)
        stop.ask_for_others(int(signum))
        return int(signum)

    def look_at(self, neighbour: Neighbour) -> None:
        """Read a neighbour's beat, and tell all ranks if it is lost."""
        if beat := self.beat_of(neighbour.rank):
            neighbour.hear(beat, self.awake)
        problem = neighbour.loss(self.awake, self.lost_seconds) or neighbour.absence(self.awake, self.hang_seconds)
        if problem is None and neighbour.hangs(self.hang_seconds):
            problem = self.describe_hang()
        if problem is not None:
            self.failure = self.store.compare_set("failed", "", problem).decode()

    def beat_of(self, rank: int) -> Beat | None:
        """Return a rank's last beat, or None before its first."""
        key = f"beat/{rank}"
        return Beat(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    def describe_hang(self) -> str:
        """Describe the positions of all ranks. The rarest come first, since the other ranks probably wait there."""
        at: dict[str, list[str]] = {}
        for rank in range(self.world_size):
            if beat := self.beat_of(rank):
                at.setdefault(beat.position, []).append(f"rank {rank} ({beat.process})")
        places = sorted(at.items(), key=lambda place: len(place[1]))
        found = "\n".join(f"{', '.join(ranks)} at\n{place}" for place, ranks in places)
        return f"no progress for {self.hang_seconds:g} s (train.ddp_timeout). The main threads were last at:\n{found}"

    # In the main thread

    def join(self) -> None:
        """Wait until all ranks are here. Then they can form the process group without waiting for each other.

        Raises RankLost if a rank is lost. Raises Stopped on every rank if one got a signal before all were here.
        """
        if stop.signum is None and self.meeting_store.add("here", 1) == self.world_size:
            self.meeting_store.compare_set("joined", "", "all")
        for _ in until(self.meeting_store, "joined"):
            mark_alive()
            self.check()
            if stop.signum is not None:
                self.publish_stop(self.meeting_store)
                self.meeting_store.compare_set("joined", "", "stop")
        if self.meeting_store.get("joined") != b"all":
            raise Stopped(self.hear_of_stop(self.meeting_store))
        self.has_joined = True

    def meet(self) -> None:
        """Wait for all ranks as long as they make progress. Raise RankLost if one is lost.

        Unlike a collective, this has no time-out. So a rank can wait for a slow reward function on another rank.
        """
        number = next(self.meetings)
        with suppress(DistNetworkError):  # the store is gone: the collective that follows is enough
            if self.meeting_store.add(f"arrived/{number}", 1) == self.world_size:
                self.meeting_store.set(f"met/{number}", "")
                for key in (f"arrived/{number - 1}", f"met/{number - 1}"):
                    self.meeting_store.delete_key(key)
            for _ in until(self.meeting_store, f"met/{number}"):
                mark_alive()
                self.check()

    def check(self) -> None:
        """Raise RankLost if a rank is lost."""
        if self.failure is not None:
            raise RankLost(f"{self.failure}\n{HOW_TO_CONTINUE}")

    @contextmanager
    def failures_shared(self) -> Iterator[None]:
        """Show the other ranks the error that ends the block, unless all ranks raise it.

        If a lost rank may have caused the error, wait for the verdict and raise RankLost instead. Keep an RLVLMError,
        which names its cause: ranks that refuse the same settings one after the other then all report it.
        """
        try:
            yield
        except Exception as error:
            if getattr(error, "on_all_ranks", False) or isinstance(error, RankLost):
                raise
            is_of_collective = OF_COLLECTIVES.search(f"{type(error).__name__} {error}") is not None
            if is_of_collective:
                self.await_verdict(self.lost_seconds + 5 * INTERVAL)
            if is_of_collective or not isinstance(error, RLVLMError):
                try:
                    self.check()
                except RankLost as lost:
                    raise lost from error
            self.publish(error)
            raise

    def await_verdict(self, seconds: float) -> None:
        """Wait for a verdict, for this many seconds."""
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.1)

    def publish(self, error: BaseException) -> None:
        """Show the traceback to all ranks."""
        self.has_failed = True
        text = "".join(traceback.format_exception(error)).rstrip()
        process = Beat.now(0).process
        with suppress(DistNetworkError, DistStoreError):
            self.meeting_store.compare_set("failed", "", f"rank {self.rank} ({process}) failed:\n{text}")

    def leave(self) -> None:
        """Wait a while for the other ranks to finish, then stop watching. Ranks that end from now on are not lost.

        The launcher ends the other ranks when the first one has ended. So a failed rank gives them time to raise.
        """
        seconds = LEAVE_SECONDS if self.has_joined and not self.has_failed else RAISE_SECONDS
        with suppress(DistNetworkError):
            for _ in waiting_for_all(self.meeting_store, "left", self.world_size, seconds):
                if self.failure is not None and not self.has_failed:
                    break
        self.is_leaving.set()
        self.threads[0].join(2 * INTERVAL)
        with suppress(DistNetworkError, DistStoreError):
            if stop.signum is not None:
                self.publish_stop(self.meeting_store)
            self.meeting_store.set(f"beat/{self.rank}", json.dumps(vars(Beat.now(next(self.beats), has_left=True))))


HOW_TO_CONTINUE = "To continue from the last checkpoint, repeat the command with resume_from_checkpoint=auto."


def watch_ranks(number: int, lost_seconds: float, hang_seconds: float) -> Watch | None:
    """Start to watch the ranks of this launch. `number` counts the runs of these processes.

    Returns None for a single process, or if the launcher gave no address of a store.
    """
    if not is_one_of_several():
        return None
    own, of_main_thread = (connect(f"watch-{number}", timedelta(seconds=hang_seconds)) for _ in range(2))
    for store in (own, of_main_thread):
        store.set_timeout(timedelta(seconds=lost_seconds))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Watch(own, of_main_thread, rank, world_size, lost_seconds, hang_seconds).start()


def until(store: Store, key: str) -> Iterator[None]:
    """Yield until the key exists, at first each millisecond and later ten times a second.

    It replaces the store's `wait`, which prints warnings when its time is up.
    """
    pause = 0.001
    while not store.check([key]):
        yield
        time.sleep(pause)
        pause = min(1.2 * pause, 0.1)


def waiting_for_all(store: Store, name: str, world_size: int, seconds: float) -> Iterator[None]:
    """Yield until all ranks have called this with the name, or the time is up."""
    if store.add(name, 1) == world_size:
        store.set(f"all_{name}", "")
    end = time.monotonic() + seconds
    for _ in until(store, f"all_{name}"):
        if time.monotonic() > end:
            return
        yield


def this_host() -> str:
    """Return the names of this host and its PID namespace."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else ''}"


def is_alive(pid: int) -> bool:
    """Return whether a process of this host exists and is no zombie."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
