"""Requests to a judge: concurrent, limited per minute and by a budget, and repeated if this may help."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from rewards.contract import on_one_line
from rewards.judges.body import ACCEPTED, BodyError, read_body
from rewards.judges.replies import ReplyCache

RETRIED_STATUSES = {408, 409, 425, 429, *range(500, 600)}
FIRST_PAUSE = 0.5
"""Seconds before the first retry. Each further retry waits twice as long."""
LONGEST_PAUSE = 120.0
LONGEST_SHOWN = 200
LONGEST_READ = 2000
"""Maximum characters of a refusal that are read before it is shortened for display."""


class Limits(NamedTuple):
    """Settings of an endpoint."""

    base_url: str
    api_key_env: str
    concurrency: int
    requests_per_minute: float | None
    retries: int
    timeout: float
    cache: str
    max_calls: int | None


class RequestError(Exception):
    """Raised if a request failed and no retry is left or would help."""


class BudgetError(Exception):
    """Raised instead of a request beyond `max_calls`."""


class TryAgainError(Exception):
    """Raised if the same request may succeed later."""

    def __init__(self, problem: str, retry_after: float | None = None) -> None:
        """`retry_after` is the wait that the server asks for, in seconds."""
        super().__init__(problem)
        self.retry_after = retry_after


class Endpoint:
    """One judge's server, for one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.url = f"{limits.base_url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self.key = api_key(limits.api_key_env)
        self.cache = ReplyCache(limits.cache) if limits.cache else None
        self.num_calls = 0
        self.slots = asyncio.Semaphore(limits.concurrency)
        self.next_start = 0.0
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None), limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )

    async def post(self, body: dict[str, Any]) -> Any:
        """Send a request, with retries, and return the answer's JSON. Raises RequestError or BudgetError."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TryAgainError), stop=stop_after_attempt(1 + self.limits.retries), wait=pause,
            sleep=asyncio.sleep, reraise=True,
        )  # fmt: skip
        try:
            return await retrying(self.send, body)
        except TryAgainError as error:
            raise RequestError(f"{self.url} {error} ({1 + self.limits.retries} tries)") from None

    async def send(self, body: dict[str, Any]) -> Any:
        """Wait for a free slot and a turn, and send one request."""
        async with self.slots:
            self.count_call()
            await self.wait_for_turn()
            response = await self.respond(body)
        if response.status_code in RETRIED_STATUSES:
            raise TryAgainError(self.refusal(response), retry_after(response.headers.get("Retry-After", "")))
        if not response.is_success:
            raise RequestError(f"{self.url} {self.refusal(response)}")
        try:
            return response.json()
        except (ValueError, RecursionError):  # RecursionError: lists are nested too deeply
            raise TryAgainError("answers with something else than JSON") from None

    async def respond(self, body: dict[str, Any]) -> httpx.Response:
        """Send one request and return the answer with any status. Raises TryAgainError or RequestError."""
        headers = ACCEPTED | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = {"method": "POST", "url": self.url, "json": body, "headers": headers}
        try:
            async with asyncio.timeout(self.limits.timeout), self.client.stream(**request) as response:
                content = await read_body(response)
        except BodyError as error:
            raise RequestError(f"{self.url} answers with {error}") from None
        except TimeoutError:
            raise TryAgainError(f"does not answer within {self.limits.timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TryAgainError(f"cannot be reached: {self.without_key(str(error)) or type(error).__name__}") from None
        kept = {name: value for name, value in response.headers.items() if name == "retry-after"}
        return httpx.Response(response.status_code, headers=kept, content=content)

    async def wait_for_turn(self) -> None:
        """Wait until the next start time, so that requests are evenly spaced."""
        if self.limits.requests_per_minute:
            start = max(time.monotonic(), self.next_start)
            self.next_start = start + 60 / self.limits.requests_per_minute
            await asyncio.sleep(start - time.monotonic())

    def count_call(self) -> None:
        """Count a request. Raises BudgetError if it exceeds the budget."""
        maximum = self.limits.max_calls
        if maximum is None:
            return
        if self.num_calls < maximum:
            self.num_calls = self.cache.count_call() if self.cache else self.num_calls + 1
            if self.num_calls <= maximum:
                return
        place = f"; they are counted in {self.cache.folder / 'calls'}" if self.cache else ""
        raise BudgetError(f"the budget of max_calls={maximum} requests to the judge is spent{place}")

    def refusal(self, response: httpx.Response) -> str:
        """Describe an answer with an error status."""
        text = on_one_line(self.without_key(response.text)[:LONGEST_READ])
        return f"answers with status {response.status_code}: {text[:LONGEST_SHOWN]}"

    def without_key(self, text: str) -> str:
        """Replace the API key in a text by stars."""
        return text.replace(self.key, "***") if self.key else text


@functools.lru_cache(maxsize=32)
def endpoint(limits: Limits, loop: asyncio.AbstractEventLoop) -> Endpoint:
    """Return the endpoint with these settings for an event loop. All calls share its slots, turns and budget."""
    return Endpoint(limits)


def api_key(name: str) -> str:
    """Return the API key in an environment variable, if one is named. Raises ValueError if it is not set."""
    if name and not os.environ.get(name):
        raise ValueError(f"judge: api_key_env names the environment variable {name}, which is not set")
    return os.environ[name] if name else ""


def pause(state: RetryCallState) -> float:
    """Return the seconds before the next try: as the server asks, or else twice the last pause."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after if isinstance(error, TryAgainError) else None
    return min(FIRST_PAUSE * 2 ** (state.attempt_number - 1) if asked is None else asked, LONGEST_PAUSE)


def retry_after(header: str) -> float | None:
    """Return the seconds that the header Retry-After asks for, as a number or a date, or None if it has neither."""
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
