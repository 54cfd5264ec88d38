"""HTTP requests to servers of models: limited in time and bytes, and repeated if that may help."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from typing import TYPE_CHECKING, Any

from rewards.contract import on_one_line

if TYPE_CHECKING:
    import httpx

Slot = Callable[[], AbstractAsyncContextManager[Any]]

CONNECT_SECONDS = 30.0
RETRIED_STATUSES = {408, 409, 425, 429, *range(500, 600)}
FIRST_PAUSE = 0.5
"""Seconds before the first retry. Each further retry waits twice as long."""
LARGEST_BODY = 8 * 2**20
"""Maximum bytes of an answer, both as they arrive and decompressed. A chat completion has thousands."""
GZIP = 16 + zlib.MAX_WBITS


@dataclass(eq=False)
class RequestError(Exception):
    """A request without a usable answer. The message continues the server's address."""

    problem: str
    detail: str = ""
    may_help: bool = True
    """Whether the same request may succeed later."""
    status: int | None = None
    """The error status of the answer, whose text is the detail."""
    retry_after: float | None = None
    """The wait that the server asks for, in seconds."""

    def __str__(self) -> str:
        return f"{self.problem}: {self.shown}" if self.detail else self.problem

    @property
    def shown(self) -> str:
        """The start of the detail on one line."""
        return on_one_line(self.detail[:2000])[:300]


async def post(
    url: str, key: str, body: Any, timeout: float, retries: int, longest_pause: float, turn: Slot = nullcontext
) -> Any:
    """Post a request and return the answer's JSON. Raises RequestError if it is refused or every try fails.

    `timeout` limits each try, in seconds. Each try runs in the context `turn()`.
    """
    from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

    async def attempt() -> Any:
        async with turn():
            content = await send("POST", url, key, body, timeout)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:  # RecursionError: lists are nested too deeply
            raise RequestError("answers with something else than JSON") from error

    def pause(state: RetryCallState) -> float:
        asked = getattr(state.outcome and state.outcome.exception(), "retry_after", None)
        return min(FIRST_PAUSE * 2 ** (state.attempt_number - 1) if asked is None else asked, longest_pause)

    retrying = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, RequestError) and error.may_help),
        stop=stop_after_attempt(1 + retries), wait=pause, sleep=asyncio.sleep, reraise=True,
    )  # fmt: skip
    return await retrying(attempt)


async def send(
    method: str, url: str, key: str, body: Any, timeout: float, largest: int = LARGEST_BODY, use_proxies: bool = True
) -> bytes:
    """Send a request with a JSON body and return the content of the answer. Raises RequestError, without the key.

    `timeout` limits the whole request, in seconds, and `largest` the answer, in bytes. `use_proxies` takes proxies from
    the environment.
    """
    import httpx

    headers = {"Accept-Encoding": "gzip"} | ({"Authorization": f"Bearer {key}"} if key else {})
    client = shared_client(asyncio.get_running_loop(), use_proxies)
    try:
        async with asyncio.timeout(timeout), client.stream(method, url, json=body, headers=headers) as response:
            if response.is_success:
                return await read_body(response, largest)
            raise await refusal(response, key, largest)
    except TimeoutError as error:
        raise RequestError("cannot be reached", f"timed out after {timeout:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        detail = "timed out" if isinstance(error, httpx.TimeoutException) else reason(error)
        raise RequestError("cannot be reached", without(key, detail)) from error


async def refusal(response: httpx.Response, key: str, largest: int) -> RequestError:
    """Build the error for an answer with an error status. Its detail is empty if the body cannot be read."""
    import httpx

    status, body = response.status_code, b""
    with suppress(RequestError, httpx.HTTPError):
        body = await read_body(response, largest)
    wait = retry_after(response.headers.get("Retry-After", ""))
    text = without(key, body.decode(errors="replace"))
    return RequestError(f"answers with status {status}", text, status in RETRIED_STATUSES, status, wait)


async def read_body(response: httpx.Response, largest: int) -> bytes:
    """Return the body of a streamed answer, decompressed. Raises RequestError if it is too large or damaged.

    httpx would decompress each arriving piece as a whole, and a piece of 64 KiB may hold 64 MiB.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise RequestError(f"answers with the encoding {encoding!r}, which was not asked for", may_help=False)
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > largest:
            break
    try:
        content = zlib.decompressobj(GZIP).decompress(body, largest + 1) if encoding == "gzip" else bytes(body)
    except zlib.error:
        raise RequestError("answers with damaged gzip", may_help=False) from None
    if max(len(body), len(content)) > largest:
        raise RequestError(f"answers with more than {largest // 2**20} MiB", may_help=False)
    return content


def without(key: str, text: str) -> str:
    """Replace the API key in a text by stars."""
    return text.replace(key, "***") if key else text


def reason(error: BaseException) -> str:
    """Return the root cause of an httpx error in words, such as "Connection refused"."""
    import httpx

    inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    if inner is not None and not isinstance(error, httpx.InvalidURL):
        return reason(inner)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def retry_after(header: str) -> float | None:
    """Return the seconds that the header Retry-After asks for, as a number or a date, or None if it has neither."""
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        date = parsedate_tz(header)
        return max(0.0, mktime_tz(date) - time.time()) if date else None
    except (ValueError, OverflowError):
        return None


@functools.lru_cache(maxsize=32)
def shared_client(loop: asyncio.AbstractEventLoop, use_proxies: bool) -> httpx.AsyncClient:
    """Make an event loop's client. It sends any number of requests at once, each on a new connection."""
    import httpx

    certificates = httpx.create_ssl_context()
    certificates.load_default_certs()  # also those of the system
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        verify=certificates,
        trust_env=use_proxies,
    )
