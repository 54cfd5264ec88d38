"""Supervision of users' code in processes: whatever happens, nothing of it is left.

    main process ─► supervisor ─► worker, which runs the user's code ─► processes that the code starts

A worker can hang in C, ignore signals, use all memory or crash, so that it cannot clean up after itself. Its supervisor
runs no user's code. It kills the worker and all processes that come from it as soon as the worker or the main process
has ended in any way, the main process asks for it, or they use more memory than they may.

On Linux, the supervisor becomes the parent of each process whose parent has ended, so it also finds processes that
began a new session. On other systems, it finds only the processes of the worker's process group.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple, NoReturn

LONGEST_WAIT, SHORTEST_WAIT = 1.0, 0.02
"""Seconds between two looks at the memory."""
SEARCH_SHARE = 1 / 100
"""Largest share of a core for the search for new processes, which takes longer if the machine has many."""
BYTES_PER_SECOND = 8e9
"""Maximum speed at which a process is expected to fill memory, in bytes per second."""
SIGNALS = (signal.SIGCHLD, signal.SIGTERM)
"""Signals that a supervisor handles: a child has ended, and the main process asks it to end."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
EASIER_TO_KILL = "500"
"""Addition to the worker's score for the kernel, which kills the process with the highest if memory runs out."""


class Ending(NamedTuple):
    """How a worker has ended."""

    exit_code: int | None
    """As of `subprocess`: negative for a signal. None if it is unknown."""
    used_bytes: int | None = None
    """Memory of the worker and its processes, if it was killed because of it."""

    def __str__(self) -> str:
        """Return the ending in words that follow the name of a process."""
        if self.used_bytes is not None:
            return f"used {self.used_bytes / 2**30:.2f} GiB of memory and was killed"
        if self.exit_code is None:
            return "was killed"
        if self.exit_code >= 0:
            return f"ended with exit code {self.exit_code}"
        with suppress(ValueError):
            return f"ended with signal {-self.exit_code} ({signal.Signals(-self.exit_code).name})"
        return f"ended with signal {-self.exit_code}"


def become_worker(lifeline: int, reports: Connection, others: Connection, max_bytes: int | None) -> None:
    """Fork. Return in the worker, a new session. This process becomes its supervisor, and never returns.

    `lifeline` can be read if the main process has ended. The supervisor sends how the worker has ended to `reports`.
    `others` is a connection of the worker that the supervisor must not keep open.
    """
    control_process(PR_SET_CHILD_SUBREAPER, 1)
    events, woken = os.pipe()
    for end in (events, woken):
        os.set_blocking(end, False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}  # before the fork: misses none
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    supervisor = os.getpid()
    worker = os.fork()
    if worker:
        others.close()
        supervise(worker, lifeline, events, reports, max_bytes)
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)
    for end in (events, woken, lifeline):
        os.close(end)
    reports.close()
    os.setsid()
    control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    with suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text(EASIER_TO_KILL)


def control_process(option: int, value: int) -> None:
    """Set an attribute of this process, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def supervise(worker: int, lifeline: int, events: int, reports: Connection, max_bytes: int | None) -> NoReturn:
    """Wait until the worker has ended or must end. Kill all that is left of it, report the ending, and exit."""
    try:
        ending = wait_for_ending(worker, lifeline, events, max_bytes)
        kill_all(worker)
        with suppress(OSError):  # the main process has ended
            reports.send_bytes(json.dumps(ending).encode())
    finally:
        os._exit(0)


def wait_for_ending(worker: int, lifeline: int, events: int, max_bytes: int | None) -> Ending:
    """Wait until the worker has ended or must end. The latter has no exit code."""
    memory, seconds, main = Memory(), LONGEST_WAIT, os.getppid()
    while True:
        if (code := reaped(worker)) is not None:
            return Ending(code)
        if max_bytes is not None:
            used = memory.used_bytes(more_than=max_bytes)
            if used > max_bytes:
                return Ending(None, used)
            seconds = min(LONGEST_WAIT, max(SHORTEST_WAIT, (max_bytes - used) / BYTES_PER_SECOND))
        ready = wait([lifeline, events], seconds)
        if lifeline in ready or os.getppid() != main:  # forks of the main process may hold the lifeline
            return Ending(None)
        if events in ready and signal.SIGTERM in os.read(events, 65536):
            return Ending(None)


def reaped(worker: int) -> int | None:
    """Reap children that have ended. Return the exit code of the worker, if it is one of them."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                return os.waitstatus_to_exitcode(found[1])
    return None


def kill_all(worker: int) -> None:
    """Kill the worker and all processes that come from it, and wait until they have ended."""
    import psutil

    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:  # the children of each process that ends become children of this one
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            os.waitpid(-1, 0)


class Memory:
    """Measures the memory of all processes that come from this one.

    It counts resident memory, not the address space: browsers, CUDA and thread pools reserve much more than they use.
    `RLIMIT_AS` and `RLIMIT_DATA` would count the address space, and each process alone.
    """

    def __init__(self) -> None:
        self.next_search = 0.0
        self.is_ours = {os.getpid(): True}
        """Whether a process of the machine comes from this one, by its number."""
        self.processes: list = []

    def used_bytes(self, more_than: int) -> int:
        """Return the bytes of all processes. If they are more than this, pages that several share count once."""
        import psutil

        if time.monotonic() >= self.next_search:
            started = time.thread_time()
            self.search()
            self.next_search = time.monotonic() + (time.thread_time() - started) / SEARCH_SHARE
        used = 0
        for process in self.processes:
            with suppress(psutil.Error):
                used += process.memory_info().rss
        if used <= more_than:
            return used
        used = 0
        for process in self.processes:
            with suppress(psutil.Error):
                full = process.memory_full_info()
                used += getattr(full, "pss", full.rss)
        return used

    def search(self) -> None:
        """Find the processes that come from this one. Only the parents of new processes are looked up.

        A process whose parent is not known yet is asked again by the next search.
        """
        import psutil

        numbers = set(psutil.pids())
        self.is_ours = {number: is_ours for number, is_ours in self.is_ours.items() if number in numbers}
        self.processes = [process for process in self.processes if process.pid in numbers]
        new = {}
        for number in numbers - self.is_ours.keys():
            with suppress(psutil.Error):
                process = psutil.Process(number)
                new[process] = process.ppid()
        while known := [process for process, parent in new.items() if parent in self.is_ours or not parent]:
            for process in known:
                self.is_ours[process.pid] = self.is_ours.get(new.pop(process), False)
                if self.is_ours[process.pid]:
                    self.processes.append(process)
