"""Signals that end a run: Ctrl-C (SIGINT), SIGTERM, SIGUSR1 and SIGHUP. The last two count as SIGTERM.

    until ranks are joined   `Watch.join` raises Stopped, on all ranks or on none
    while a run is built     the main thread raises KeyboardInterrupt
    while it takes steps     `stop.check()` raises Stopped at the next safe point

A thread reads the signals, since the main thread may be in a collective, in which Python handles none.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from rl_vlm.distributed.sign_of_life import mark_alive, position
from rl_vlm.errors import Stopped

T = TypeVar("T")

COUNTS_AS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
REPEAT_SECONDS = 10.0
"""Time in which further signals are repetitions of the first: launchers send each signal several times."""
NO_MORE = b"\0"
"""Byte in the pipe after the last signal."""
BUILD_SECONDS = 30.0
"""Time that an evaluation, or a run that is still being built, has to end after a signal."""
WAIT_SECONDS = 0.5
"""Time between checks during a wait."""


class Stop:
    """A request to stop, by a signal to this process or to another rank. `Watch` reports the latter."""

    def __init__(self) -> None:
        self.signum: int | None = None
        """SIGINT or SIGTERM if the run is to stop."""
        self.first_signal: float | None = None
        """Time of the first signal to this process."""
        self.is_handled = False
        self.is_joining = False
        """Whether this is one of several processes that are not joined yet."""
        self.is_deferred = False
        self.has_raised = False
        self.num_postponed = 0
        self.grace_seconds = BUILD_SECONDS
        self.timer: threading.Timer | None = None

    @property
    def exit_status(self) -> int:
        """Return the status of a process that the signal ends: 130 for Ctrl-C, else 143."""
        return 128 + (self.signum or signal.SIGINT)

    def check(self) -> None:
        """Raise Stopped if the run is to stop. Call this at safe points: a step that ends here is repeated exactly.

        Call it within `Ranks.agree`, so that all ranks stop. It marks progress.
        """
        mark_alive()
        if self.signum is not None and not self.num_postponed:
            raise Stopped(self.signum)

    def checked(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, with a `check` before each."""
        for item in items:
            self.check()
            yield item

    def ask(self, signum: int) -> None:
        """Ask the run to stop. End the process if it has not stopped after the grace period."""
        self.signum = self.signum or signum
        if self.timer is not None:
            return
        seconds = self.grace_seconds if self.is_deferred else BUILD_SECONDS
        self.timer = threading.Timer(seconds, self.end, [f"has not stopped within {seconds:g} s of a signal"])
        self.timer.daemon = True
        self.timer.start()

    @property
    def raises(self) -> bool:
        """Return whether a signal raises KeyboardInterrupt in the main thread, at any point."""
        return not (self.is_joining or self.is_deferred or self.has_raised)

    def end_joining(self) -> None:
        """Let signals raise KeyboardInterrupt from now on. Raise it now if a signal came before."""
        self.is_joining = False
        if self.signum is not None and self.raises:
            self.has_raised = True
            raise KeyboardInterrupt

    def ask_for_others(self, signum: int) -> None:
        """Ask this rank to stop because another rank got the signal."""
        if self.signum is None:
            self.ask(signum)
            if self.is_handled and self.raises:
                _thread.interrupt_main(signal.Signals(signum))

    def note_signal(self, number: int) -> None:
        """Note a signal to this process. If it comes too late to be a repetition, end the process at once."""
        now = time.monotonic()
        if self.first_signal is None:
            self.first_signal = now
            self.ask(COUNTS_AS[signal.Signals(number)])
        elif now - self.first_signal > REPEAT_SECONDS:
            self.end("was sent a second signal, and ends at once")

    def end(self, reason: str) -> NoReturn:
        """End the process, and print the position of the main thread."""
        end_process(self.exit_status, f"process {os.getpid()} {reason}. The main thread was at\n{position()}")

    @contextmanager
    def deferred(self, grace_seconds: float) -> Iterator[None]:
        """Let only `check` raise in the block. After a signal, the block has `grace_seconds` to stop."""
        self.is_deferred, self.grace_seconds = True, grace_seconds
        try:
            yield
        except Stopped as stopped:  # another rank may have raised it before the watch learns of the signal
            self.signum = self.signum or stopped.args[0]
            raise
        finally:
            self.is_deferred, self.has_raised = False, self.signum is not None

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Keep `check` from raising in the block, because other processes take part in it."""
        self.num_postponed += 1
        try:
            yield
        finally:
            self.num_postponed -= 1


_restored: dict[int, Any] = {}
"""Handlers that `handled` sets at its end instead of the earlier ones."""

stop = Stop()
"""The request to stop this process. All of its runs share it."""


def wait_for(future: Future[T]) -> T:
    """Return a future's result. A stop cancels it, and the wait counts as progress."""
    wait_until_done(future)
    return future.result()


def wait_until_done(future: Future[Any]) -> None:
    """Wait for a future that may fail. A stop cancels it, and the wait counts as progress."""
    while not wait([future], WAIT_SECONDS).done:
        try:
            stop.check()
        except Stopped:
            future.cancel()
            raise


@contextmanager
def handled(is_joining: bool = False) -> Iterator[None]:
    """Handle the signals in this context. Do nothing in a nested context, or outside the main thread.

    With `is_joining`, signals raise only after `stop.end_joining`. The processes then have joined, so all of them learn
    of the signal. Signals that are ignored already, such as SIGHUP with nohup, stay ignored.
    """
    if stop.is_handled or threading.current_thread() is not threading.main_thread():
        yield
        return
    vars(stop).update(vars(Stop()), is_handled=True, is_joining=is_joining)  # forget the signals of an earlier run
    before = {number: signal.getsignal(number) for number in COUNTS_AS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    descriptor_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_note_signals, args=(reader,), name="signals", daemon=True)
    thread.start()
    _set_handlers(dict.fromkeys(before, _interrupt))
    try:
        yield
    finally:
        _set_handlers(before | _restored)
        signal.set_wakeup_fd(descriptor_before)
        os.write(writer, NO_MORE)  # a forked process may keep the pipe open
        thread.join()  # or a signal that it notes later would end the process
        os.close(writer)
        stop.is_handled = False
        if stop.timer:
            stop.timer.cancel()


@contextmanager
def ignored_afterwards() -> Iterator[None]:
    """Ignore the signals after this context. It runs the command of a process, whose exit status must not change.

    The launcher sends the other ranks a signal when the first one has ended.
    """
    global _restored
    _restored = dict.fromkeys(COUNTS_AS, signal.SIG_IGN)
    try:
        yield
    finally:
        _set_handlers(_restored)


def _set_handlers(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt once, unless `stop.check` or `Watch.join` raises."""
    stop.signum = stop.signum or COUNTS_AS[signal.Signals(number)]  # the thread may note it later
    if stop.raises:
        stop.has_raised = True
        raise KeyboardInterrupt


def _note_signals(reader: int) -> None:
    """Note the signals whose numbers are read from the pipe, up to `NO_MORE`."""
    while (number := os.read(reader, 1)) != NO_MORE:
        if number[0] in COUNTS_AS:
            stop.note_signal(number[0])
    os.close(reader)


_mask = threading.local()
"""The signals that a thread blocked before it forked."""


def _block_signals() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, COUNTS_AS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _forget_in_child() -> None:
    """Stop handling signals in a forked process. Otherwise its signals would go through the parent's pipe."""
    if stop.is_handled:
        signal.set_wakeup_fd(-1)
        for number in COUNTS_AS:
            if signal.getsignal(number) is _interrupt:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _unblock_signals()


os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_forget_in_child)


def end_process(status: int, message: str) -> NoReturn:
    """End this process and its children at once, from any thread."""
    print(f"rl-vlm: {message}", file=sys.stderr, flush=True)
    kill_children()
    os._exit(status)


def kill_children() -> None:
    """Kill all descendants of this process."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
