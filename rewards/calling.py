"""Calls reward functions, sync or async, with the arguments that they declare."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import chdir, suppress
from inspect import Parameter
from pathlib import Path
from typing import Any

from rewards.contract import Answer, Fault, RewardFunction, failed, read_returned, text_of

# Arguments that every call offers in addition to data columns. `Call` adds log_extra and log_metric.
OFFERED = (
    "prompts", "completions", "completion_ids", "images", "image_sizes", "model_image_sizes", "image_path",
    "image_grid_thw", "video_duration", "video_frame_times", "turns", "finish_reasons", "environments",
    "trainer_state", "log_extra", "log_metric",
)  # fmt: skip

OF_MEDIA = frozenset({
    "images", "image_sizes", "model_image_sizes", "image_path", "image_grid_thw", "video_duration", "video_frame_times",
})  # fmt: skip
"""Arguments in `OFFERED` that are made of the row's images and videos."""

LONGEST_TEXT = 220
"""Maximum characters of an exception's text in a message. The place that follows it is never cut off."""


def parameters(function: RewardFunction) -> dict[str, Parameter]:
    """Return the named parameters of a function."""
    unnamed = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind not in unnamed}


def takes_anything(function: RewardFunction) -> bool:
    """Return whether a function has `**kwargs`."""
    return any(p.kind is Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def is_async(function: RewardFunction) -> bool:
    """Return whether a function, or the function that it wraps, is declared with `async`."""
    innermost = inspect.unwrap(function)
    return inspect.iscoroutinefunction(innermost) or inspect.iscoroutinefunction(type(innermost).__call__)


def select_arguments(function: RewardFunction, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offered arguments that the function declares, or all if it has `**kwargs`."""
    if takes_anything(function):
        return dict(offered)
    return {name: offered[name] for name in parameters(function) if name in offered}


class Call:
    """One call for `count` completions. A sync function runs in `__init__`. An async one may finish later.

    Every exception becomes a fault, even KeyboardInterrupt. A signal may have raised it within the function, so check
    after the call whether a signal came. A sync function's change of the working directory is undone. Around an async
    one, use `contextlib.chdir(".")`.
    """

    def __init__(self, function: RewardFunction, arguments: Mapping[str, Any], count: int) -> None:
        """`arguments` are passed unchanged. `log_extra` and `log_metric` are added if the function declares them."""
        self.count = count
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}
        self.returned: Future[Any] = Future()
        loggers = select_arguments(function, {"log_extra": self.log_extra, "log_metric": self.log_metric})

        def call() -> Any:
            with chdir("."):
                return function(**arguments, **loggers)

        returned = or_fault(call)
        if inspect.iscoroutine(returned):
            self.returned = asyncio.run_coroutine_threadsafe(returned, background_loop("rewards"))
        else:
            self.returned.set_result(returned)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the completions file, one value per completion (TRL's `log_extra`)."""
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {self.count} completions")
        self.extras[str(column)] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """Add a scalar that is averaged over the calls of a step (TRL's `log_metric`)."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def answer(self) -> Answer:
        """Wait for the function and read its result."""
        returned = self.returned.result()
        try:
            answer = read_returned(returned, self.count)
        except BaseException as error:  # a returned object's own methods may raise
            answer = failed(fault_of(error), self.count)
        answer.extras, answer.metrics = self.extras, self.metrics
        return answer


def or_fault(call: Callable[[], Any]) -> Any:
    """Call `call` and return its result, or a fault if it raises any BaseException.

    If the result is awaitable, return a coroutine that awaits it and does the same.
    """
    try:
        returned = call()
        is_async = inspect.isawaitable(returned)
    except BaseException as error:
        return fault_of(error)
    return _awaited_or_fault(returned) if is_async else returned


async def _awaited_or_fault(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except BaseException as error:
        return fault_of(error)


def fault_of(error: BaseException) -> Fault:
    """Build the fault for a function that raised this exception."""
    return Fault("exception", f"raised {describe(error)}")


def describe(error: BaseException) -> str:
    """Describe an exception on one line, with the place where it was raised."""
    text, frames = text_of(error), traceback.extract_tb(error.__traceback__)[-1:]
    places = [f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name})" for frame in frames]
    shown = text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…"
    return f"{type(error).__name__}: {shown}{''.join(places)}"


@functools.cache
def background_loop(name: str) -> asyncio.AbstractEventLoop:
    """Start one event loop of this name for the whole process, in its own thread, since a client belongs to one loop.

    `rewards` runs async reward functions. `http` runs requests of rollouts, so that no function can block them.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_always, args=[loop], name=name, daemon=True).start()
    return loop


def _run_always(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop. If a task ends it by KeyboardInterrupt or SystemExit, run it again with all its tasks."""
    while not loop.is_closed():
        with suppress(BaseException):
            loop.run_forever()
