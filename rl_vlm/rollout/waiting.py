"""Waits for requests of `rewards.http`. All run in one background event loop, and a stop of the run cancels them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rewards.calling import background_loop
from rl_vlm.distributed.signals import wait_for

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a request from any thread, and return its result. If the run is stopped, the request is cancelled."""
    return wait_for(asyncio.run_coroutine_threadsafe(coroutine, background_loop("http")))


async def watched(request: Awaitable[T], watch: Callable[[], Awaitable[None]], seconds: float) -> T:
    """Wait for a request, and call `watch` every `seconds`. Cancels the request if `watch` raises."""
    task = asyncio.ensure_future(request)
    try:
        while not (await asyncio.wait({task}, timeout=seconds))[0]:
            await watch()
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
