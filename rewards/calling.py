"""How a reward function is called: with the arguments it declares, sync or async."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from inspect import Parameter
from pathlib import Path
from typing import Any

from rewards.contract import Answer, Fault, RewardFunction, failed, read_returned

# What every call offers beside the columns of the data; log_extra and log_metric come from the call itself.
OFFERED = ("prompts", "completions", "completion_ids", "images", "trainer_state", "log_extra", "log_metric")


def parameters(function: RewardFunction) -> dict[str, Parameter]:
    """The named parameters of a function."""
    unnamed = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind not in unnamed}


def takes_anything(function: RewardFunction) -> bool:
    """Whether a function has `**kwargs`."""
    return any(p.kind is Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def select_arguments(function: RewardFunction, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered arguments that the function declares, or all if it has `**kwargs`."""
    if takes_anything(function):
        return dict(offered)
    return {name: offered[name] for name in parameters(function) if name in offered}


class Call:
    """One call for `count` completions. A sync function has run once this exists; an async one may still be running."""

    def __init__(self, function: RewardFunction, arguments: Mapping[str, Any], count: int) -> None:
        """`arguments` are passed as they are; `log_extra` and `log_metric` are added if the function declares them."""
        self.count = count
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}
        self.returned: Future[Any] = Future()
        loggers = select_arguments(function, {"log_extra": self.log_extra, "log_metric": self.log_metric})
        try:
            returned = function(**arguments, **loggers)
            if inspect.isawaitable(returned):
                self.returned = asyncio.run_coroutine_threadsafe(_wait(returned), background_loop())
            else:
                self.returned.set_result(returned)
        except (Exception, SystemExit) as error:
            self.returned.set_exception(error)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's `log_extra`: a column for the rollout log, one value per completion."""
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {self.count} completions")
        self.extras[column] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """TRL's `log_metric`: a scalar, averaged over the calls of a step."""
        self.metrics.setdefault(name, []).append(float(value))

    def answer(self) -> Answer:
        """Waits for the function, and reads what it returned."""
        try:
            answer = read_returned(self.returned.result(), self.count)
        except (Exception, SystemExit) as error:
            answer = failed(Fault("exception", f"raised {describe(error)}"), self.count)
        answer.extras, answer.metrics = self.extras, self.metrics
        return answer


def describe(error: BaseException) -> str:
    """An exception on one line, with the place it came from."""
    *_, place = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno} in {place.name})"


async def _wait(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except SystemExit as error:  # would end the event loop, and with it every other call
        raise RuntimeError(f"sys.exit({error})").with_traceback(error.__traceback__) from None


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """An event loop in its own thread, kept for good: the clients that async functions hold belong to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop
