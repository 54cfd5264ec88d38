"""Limits of the requests to a judge: their number at once, their number per minute, and a budget."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from rewards import http
from rewards.judges.replies import ReplyCache

LONGEST_PAUSE = 120.0
"""Maximum seconds before a retry."""


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


class BudgetError(Exception):
    """Raised instead of a request beyond `max_calls`."""


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

    async def post(self, body: dict[str, Any]) -> Any:
        """Send a request, with retries, and return the answer's JSON. Raises RequestError or BudgetError."""
        limits = self.limits
        return await http.post(self.url, self.key, body, limits.timeout, limits.retries, LONGEST_PAUSE, self.turn)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a free slot and a turn, and hold the slot during the context, which sends one request."""
        async with self.slots:
            self.count_call()
            await self.wait_for_turn()
            yield

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

    def problem(self, error: http.RequestError) -> str:
        """Describe a request that failed for good."""
        is_late = isinstance(error.__cause__, TimeoutError)
        problem = f"does not answer within {self.limits.timeout:g} s" if is_late else error
        return f"{self.url} {problem}{f' ({1 + self.limits.retries} tries)' if error.may_help else ''}"


@functools.lru_cache(maxsize=32)
def endpoint(limits: Limits, loop: asyncio.AbstractEventLoop) -> Endpoint:
    """Return the endpoint with these settings for an event loop. All calls share its slots, turns and budget."""
    return Endpoint(limits)


def api_key(name: str) -> str:
    """Return the API key in an environment variable, if one is named. Raises ValueError if it is not set."""
    if name and not os.environ.get(name):
        raise ValueError(f"judge: api_key_env names the environment variable {name}, which is not set")
    return os.environ[name] if name else ""
