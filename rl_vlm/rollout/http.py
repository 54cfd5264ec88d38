"""HTTP requests to vLLM servers and endpoints. All run in one background event loop."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

import httpx

from rl_vlm.distributed.signals import wait_for

T = TypeVar("T")

CONNECT_SECONDS = 30.0


class Unreachable(Exception):
    """The server cannot be connected to, hangs up, or does not answer in time."""


class Refused(Exception):
    """The server answers with an error status."""

    def __init__(self, status: int, body: str, retry_after: float | None = None) -> None:
        """`retry_after` is the wait that the server asks for, in seconds."""
        super().__init__(f"status {status}: {body}")
        self.status = status
        self.body = body
        self.retry_after = retry_after


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a request from any thread, and return its result. If the run is stopped, the request is cancelled."""
    return wait_for(asyncio.run_coroutine_threadsafe(coroutine, background_loop()))


async def send(
    method: str, url: str, token: str, body: Any = None, timeout: float = 60.0, use_proxies: bool = False
) -> bytes:
    """Send a request with a JSON body and return the content of the answer.

    `timeout` limits the whole request, in seconds. `use_proxies` takes proxies from the environment. Raises Unreachable
    or Refused.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with asyncio.timeout(timeout):
            response = await shared_client(use_proxies).request(method, url, json=body, headers=headers)
    except TimeoutError as error:
        raise Unreachable(f"timed out after {timeout:g} s") from error
    except httpx.TimeoutException as error:
        raise Unreachable("timed out") from error
    except httpx.InvalidURL as error:
        raise Unreachable(str(error)) from error
    except httpx.HTTPError as error:
        raise Unreachable(reason(error)) from error
    if response.is_success:
        return response.content
    retry_after = response.headers.get("Retry-After", "")
    raise Refused(response.status_code, response.text, float(retry_after) if retry_after.isdigit() else None)


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


def reason(error: BaseException) -> str:
    """Return the root cause of an httpx error in words, such as "Connection refused"."""
    inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    if inner is not None:
        return reason(inner)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


@cache
def shared_client(use_proxies: bool) -> httpx.AsyncClient:
    """Make a client that sends any number of requests at once, each on a new connection."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        verify=ssl.create_default_context(),
        trust_env=use_proxies,
    )


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """Start the event loop of all requests, in a thread that ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop
